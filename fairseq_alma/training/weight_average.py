"""A moving average of the weights without a horizon: a model to test while the learning rate stays up.

After update t the average keeps the share 2^(-1 / (f t)) of itself: what it is made of is half forgotten after f times
the updates so far, at any t, so that it serves at every arrival. A power of t weighs the past, as in Karras et al. 2024
(Analyzing and Improving the Training Dynamics of Diffusion Models, section 3.1). fairseq's own ``--store-ema`` has one
fixed decay, goes through the state dictionary tensor by tensor, and keeps a second model.
"""

from fractions import Fraction
from typing import Any, Optional

import torch
from torch import Tensor, nn

from fairseq_alma.checkpoints.training_state import AVERAGE


def average_decay(update: int, half_life: Fraction) -> float:
    """Return the share of itself that the average keeps.

    Args:
        update: number of the update that was made just now, from 1.
        half_life: f, a share of the updates so far.
    """
    return 2.0 ** float(-1 / (half_life * update))


class WeightAverage:
    """Mixed into a task, in front of `TrainTokenCount`; fairseq saves and restores the average with each checkpoint."""

    args: Any
    _average: Optional[dict[str, Tensor]] = None

    @torch.no_grad()
    def optimizer_step(self, optimizer: Any, model: nn.Module, update_num: int) -> None:
        """Make an update and average the weights; fairseq calls this."""
        super().optimizer_step(optimizer, model=model, update_num=update_num)  # type: ignore[misc]
        if self.args.ema_half_life == "none":
            return
        parameters = _parameters(model)
        if self._average is None:
            self._average = {name: tensor.detach().clone().float() for name, tensor in parameters.items()}
            return
        here = [self._on_device(name, tensor) for name, tensor in parameters.items()]
        decay = average_decay(update_num + 1, Fraction(str(self.args.ema_half_life)))
        now = [tensor if tensor.dtype == torch.float32 else tensor.float() for tensor in parameters.values()]
        torch._foreach_lerp_(here, now, 1.0 - decay)

    def _on_device(self, name: str, parameter: Tensor) -> Tensor:
        """Return the average of one parameter where the parameter is; a checkpoint is read on the CPU."""
        assert self._average is not None
        if self._average[name].device != parameter.device:
            self._average[name] = self._average[name].to(parameter.device)
        return self._average[name]

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the task beside ``task_state``."""
        kept = super().get_checkpoint_dict()  # type: ignore[misc]
        if self._average is not None:
            kept[type(self).__name__][AVERAGE] = {name: tensor.cpu() for name, tensor in self._average.items()}
        return kept

    def set_checkpoint_dict(self, state: dict[str, Any]) -> None:
        """Go on averaging where an interrupted training, or the stage before, was."""
        super().set_checkpoint_dict(state)  # type: ignore[misc]
        if self.args.ema_half_life != "none":
            self._average = state.get(AVERAGE)


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of what may be wrapped for several processes, each once."""
    while isinstance(wrapped := getattr(model, "module", None), nn.Module):
        model = wrapped
    return dict(model.named_parameters())
