"""Adam in one pass over memory, also of parameters that are spread over processes.

fairseq's own Adam goes through all weights eleven times, one parameter after the other, unless apex is installed: a
tenth of an update of a mixture, most of whose weights have few tokens to compute on.
"""

from typing import Any, Callable, Iterable, Mapping, Optional

import torch
import torch.distributed as dist
from fairseq.optim import register_optimizer
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
from torch import Tensor

from fairseq_alma.training.spread_parameters import Spread, spread_of


@register_optimizer("fused_adam", dataclass=FairseqAdamConfig)
class FusedAdam(FairseqAdam):
    """torch's fused AdamW under the options of ``--optimizer adam``, on a CPU or a GPU.

    The same update but for ``--adam-eps``, which torch adds to the corrected root of the second moment and fairseq to
    the uncorrected one: from zero moments on, the first updates differ where gradients are that small.

    With ``--expert-parallel`` and ``--fully-shard`` every process has the moments of its own parameters; a checkpoint
    has those of all.
    """

    def __init__(self, cfg: Any, params: Any) -> None:
        super().__init__(cfg, params)
        self._optimizer = WholeStateAdamW(params, fused=True, **self.optimizer_config)

    @property
    def supports_flat_params(self) -> bool:
        """Whether one flat vector may stand for all parameters."""
        return True

    def all_reduce_grads(self, module: Any) -> None:
        """Average gradients over processes, also those that are sums over the processes already."""
        super().all_reduce_grads(module)
        for each in self._optimizer.spread.values():
            if each.sums_gradients and each.parameter.grad is not None:
                each.parameter.grad.div_(dist.get_world_size())

    def multiply_grads(self, c: Any) -> None:
        """Multiply all gradients by a number, in one pass rather than one for each parameter."""
        grads = [parameter.grad for parameter in self.params if parameter.grad is not None]
        if grads:
            torch._foreach_mul_(grads, c.to(grads[0].device) if torch.is_tensor(c) else c)

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Optional[Callable[..., Tensor]] = None) -> Tensor:
        """Clip by the norm over all parameters of all processes, and return it."""
        grads = {parameter: parameter.grad for parameter in self.params if parameter.grad is not None}
        if self._optimizer.spread:
            spread = {each.parameter: each for each in self._optimizer.spread.values()}
            squares = _sum_of_squares(spread[each].own(grad) for each, grad in grads.items() if each in spread)
            dist.all_reduce(squares)
            norm = (squares + _sum_of_squares(grad for each, grad in grads.items() if each not in spread)).sqrt()
        elif aggregate_norm_fn is None and grads and all(grad.is_cuda for grad in grads.values()):
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads.values()), dtype=torch.float32)))
        else:
            return super().clip_grad_norm(max_norm, aggregate_norm_fn)
        if max_norm > 0:
            torch._foreach_div_(list(grads.values()), ((norm + 1e-6) / max_norm).clamp_(min=1))
        return norm

    def load_state_dict(self, state_dict: Mapping[str, Any], optimizer_overrides: Optional[Any] = None) -> None:
        """Load the state of all parameters, of which each process takes its part."""
        state = dict(state_dict["state"])
        for index, spread in self._optimizer.spread.items():
            if index in state:
                moments = state[index].items()
                state[index] = {name: spread.part_of(each) if each.dim() else each for name, each in moments}
        super().load_state_dict({**state_dict, "state": state}, optimizer_overrides)


def _sum_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    found = list(tensors)
    return torch.stack(torch._foreach_norm(found, dtype=torch.float32)).square_().sum() if found else torch.zeros(())


class WholeStateAdamW(torch.optim.AdamW):
    """AdamW whose state for a checkpoint is that of all processes.

    Attributes:
        spread: the parameters that are spread over processes, by their index in ``state_dict``.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        ordered = [parameter for group in self.param_groups for parameter in group["params"]]
        found = {index: spread_of(parameter) for index, parameter in enumerate(ordered)}
        self.spread: dict[int, Spread] = {index: each for index, each in found.items() if each is not None}
        self._wholes: dict[int, dict[str, Any]] = {}

    def consolidate_state_dict(self) -> None:
        """Gather weights and moments in the first process; fairseq calls this in all of them before it saves."""
        for index, spread in self.spread.items():
            spread.whole = spread.gather(spread.parameter.detach())
            moments = self.state.get(spread.parameter, {}).items()
            self._wholes[index] = {name: spread.gather(each) if each.dim() else each for name, each in moments}

    def state_dict(self) -> dict[str, Any]:
        """Return the state; what `consolidate_state_dict` has gathered for it is let go."""
        found = super().state_dict()
        found["state"] = {**found["state"], **self._wholes}
        self._wholes = {}
        for spread in self.spread.values():
            spread.whole = None
        return found
