"""Expert parallelism: the experts of a layer over several processes, each for the tokens of all.

Every process routes its own tokens, sends each to the process that has its expert, computes what it gets, and sends
the outputs back (GShard, Lepikhin et al. 2021, section 3.3). Gate, capacity and balance loss see what they see without
it, so that losses are those of one process up to rounding.

Letters: S tokens, E experts, R processes, M model dim.
"""

from typing import Any, Callable, Iterator, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairseq_alma.modules.moe.dispatch import Dispatch
from fairseq_alma.modules.moe.experts import Experts

Compute = Callable[[Tensor, Dispatch], Tensor]


class ExpertExchange:
    """Sends tokens to the processes that have their experts, and outputs back.

    Args:
        group: R processes; number r has the experts from r x E / R on. None: all.
    """

    def __init__(self, group: Optional[dist.ProcessGroup] = None) -> None:
        self.group = group

    def __call__(self, x: Tensor, dispatch: Dispatch, compute: Compute) -> Tensor:
        """Apply the experts of all processes; all of them must call this together.

        Args:
            x: (S, M) tokens of this process.
            dispatch: which of the E experts takes which token.
            compute: applies the experts of this process to rows as a dispatch of its own says.

        Returns:
            (S, M); rows that no expert takes are zero.
        """
        sent = dispatch.counts.view(dist.get_world_size(self.group), -1)  # (R, E / R)
        received = torch.empty_like(sent)  # from each process, for each expert here
        dist.all_to_all_single(received, sent, group=self.group)
        to, back = sent.sum(1).tolist(), received.sum(1).tolist()  # the sizes of messages must be known to the host
        taken = dispatch.order[: sum(to)]
        rows = Exchange.apply(x[taken], to, back, self.group)
        num_own = sent.size(1)
        expert = torch.arange(num_own, device=x.device).repeat(len(received)).repeat_interleave(received.flatten())
        counts = received.sum(0)
        out = compute(rows, Dispatch(torch.argsort(expert, stable=True), counts, counts, capacity=None))
        return x.new_zeros(x.shape).index_copy(0, taken, Exchange.apply(out, back, to, self.group))


class Exchange(torch.autograd.Function):
    """Exchange rows between processes; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        """Send rows and return what arrives.

        Args:
            ctx: autograd's context.
            rows: those for process 0, then those for process 1, …
            sent: number of rows for each process.
            received: number of rows from each.
            group: the processes; None: all.
        """
        ctx.sizes, ctx.group = (sent, received), group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Optional[Tensor], ...]:
        """Return the gradient of the rows."""
        sent, received = ctx.sizes
        return Exchange.forward(_Nothing(), gradients[0], received, sent, ctx.group), None, None, None


class _Nothing:
    """In the place of autograd's context where nothing is differentiated again."""


class Share:
    """Where a parameter lies in the whole one, whose first dimension is dealt to the processes of a group.

    Attributes:
        whole: of the last call of `gather`, on the CPU of the first process; None elsewhere.
    """

    def __init__(self, parameter: nn.Parameter, group: Optional[dist.ProcessGroup] = None) -> None:
        self.parameter, self.group = parameter, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.whole: Optional[Tensor] = None

    def take(self, whole: Tensor) -> Tensor:
        """Return this process's part of a tensor of the whole parameter's shape; what is a part already stays."""
        return whole.chunk(self.size)[self.rank].clone() if len(whole) != len(self.parameter) else whole

    def gather(self, part: Tensor) -> Optional[Tensor]:
        """Return the whole tensor in the first process, on the CPU, and None in the others; all must call this."""
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(part.contiguous(), parts, group=self.group, group_dst=0)
        return None if parts is None else torch.cat([each.cpu() for each in parts])


def share_of(parameter: Any) -> Optional[Share]:
    """Return where a parameter lies, or None if each process has all of it."""
    return getattr(parameter, "share", None)


def spread_experts(model: nn.Module, group: Optional[dist.ProcessGroup] = None) -> int:
    """Leave each process its share of the experts of all Switch layers; weights are loaded and saved as whole ones.

    The parameters get the attribute ``expert``, by which fairseq and torch leave them out of their reduction.

    Args:
        model: the same in every process.
        group: the processes; None: all.

    Returns:
        The number of layers whose experts are spread.

    Raises:
        ValueError: the number of processes does not divide that of the experts.
    """
    layers = list(_experts(model))
    size = dist.get_world_size(group)
    for name, experts in layers:
        if experts.num_experts % size:
            raise ValueError(f"{name} has {experts.num_experts} experts, which {size} processes cannot share evenly")
    for _, experts in layers:
        for name, parameter in list(experts.named_parameters(recurse=False)):
            part = nn.Parameter(parameter.detach().chunk(size)[dist.get_rank(group)].clone())
            part.share = Share(part, group)  # type: ignore[attr-defined]
            part.expert = True  # type: ignore[attr-defined]
            setattr(experts, name, part)
        experts.exchange = ExpertExchange(group)
        experts.register_load_state_dict_pre_hook(_take_shares)
        experts.register_state_dict_post_hook(_put_wholes)
    spread = [f"{name}.{own}" for name, experts in layers for own, _ in experts.named_parameters(recurse=False)]
    model._ddp_params_and_buffers_to_ignore = spread  # type: ignore[assignment]
    return len(layers)


def _experts(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Experts))


def _take_shares(experts: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for name, parameter in experts.named_parameters(recurse=False):
        if prefix + name in state:
            state[prefix + name] = parameter.share.take(state[prefix + name])  # type: ignore[attr-defined]


def _put_wholes(experts: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for name, parameter in experts.named_parameters(recurse=False):
        whole = parameter.share.whole  # type: ignore[attr-defined]
        if whole is None:
            raise RuntimeError(f"{prefix}{name}: the shares of all processes were not gathered before")
        state[prefix + name] = whole
