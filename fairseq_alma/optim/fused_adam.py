"""Adam in one pass over memory, also of experts that are spread over processes.

fairseq's own Adam goes through all weights eleven times, one parameter after the other, unless apex is installed: a
tenth of an update of a mixture, most of whose weights have few tokens to compute on.
"""

from typing import Any, Callable, Mapping, Optional

import torch
import torch.distributed as dist
from fairseq.optim import register_optimizer
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
from torch import Tensor

from fairseq_alma.modules.moe.expert_parallel import Share, share_of


@register_optimizer("fused_adam", dataclass=FairseqAdamConfig)
class FusedAdam(FairseqAdam):
    """torch's fused AdamW under the options of ``--optimizer adam``, on a CPU or a GPU.

    The same update but for ``--adam-eps``, which torch adds to the corrected root of the second moment and fairseq to
    the uncorrected one: from zero moments on, the first updates differ where gradients are that small.

    With ``--expert-parallel`` every process has the moments of its own experts; a checkpoint has those of all.
    """

    def __init__(self, cfg: Any, params: Any) -> None:
        super().__init__(cfg, params)
        self._optimizer = WholeStateAdamW(params, fused=True, **self.optimizer_config)

    @property
    def supports_flat_params(self) -> bool:
        """Whether one flat vector may stand for all parameters."""
        return True

    def all_reduce_grads(self, module: Any) -> None:
        """Average gradients over processes; those of spread experts are sums over the tokens of all already."""
        super().all_reduce_grads(module)
        for share in self._optimizer.shares.values():
            if share.parameter.grad is not None:
                share.parameter.grad.div_(share.size)

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Optional[Callable[..., Tensor]] = None) -> Tensor:
        """Clip by the norm over all parameters of all processes, and return it."""
        shares = list(self._optimizer.shares.values())
        if not shares:
            return super().clip_grad_norm(max_norm, aggregate_norm_fn)

        def with_experts(norm: Tensor) -> Tensor:
            grads = [share.parameter.grad for share in shares if share.parameter.grad is not None]
            squares = (
                torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]).square().sum()
            )
            dist.all_reduce(squares, group=shares[0].group)
            return (norm.square() + squares).sqrt()

        return super().clip_grad_norm(max_norm, with_experts)

    def load_state_dict(self, state_dict: Mapping[str, Any], optimizer_overrides: Optional[Any] = None) -> None:
        """Load the state of all parameters, of which each process takes what it needs."""
        state = dict(state_dict["state"])
        for index, share in self._optimizer.shares.items():
            if index in state:
                state[index] = {name: share.take(each) if each.dim() else each for name, each in state[index].items()}
        super().load_state_dict({**state_dict, "state": state}, optimizer_overrides)


class WholeStateAdamW(torch.optim.AdamW):
    """AdamW whose state for a checkpoint is that of all processes.

    Attributes:
        shares: of the parameters that are spread over processes, by their index in ``state_dict``.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        ordered = [parameter for group in self.param_groups for parameter in group["params"]]
        found = {index: share_of(parameter) for index, parameter in enumerate(ordered)}
        self.shares: dict[int, Share] = {index: share for index, share in found.items() if share is not None}
        self._wholes: dict[int, dict[str, Any]] = {}

    def consolidate_state_dict(self) -> None:
        """Gather weights and moments in the first process; fairseq calls this in all of them before it saves."""
        for index, share in self.shares.items():
            share.whole = share.gather(share.parameter.detach())
            state = self.state.get(share.parameter, {})
            self._wholes[index] = {
                name: share.gather(each) if torch.is_tensor(each) and each.dim() else each
                for name, each in state.items()
            }

    def state_dict(self) -> dict[str, Any]:
        """Return the state; that of spread parameters is what `consolidate_state_dict` has gathered, and is let go."""
        found = super().state_dict()
        found["state"] = {**found["state"], **self._wholes}
        self._wholes = {}
        for share in self.shares.values():
            share.whole = None
        return found
