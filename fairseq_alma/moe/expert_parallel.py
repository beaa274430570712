"""Expert parallelism: the experts of a layer over several processes, each for the tokens of all.

Every process routes its own tokens, sends each to the process that has its expert, computes what it gets, and sends
the outputs back (GShard, Lepikhin et al. 2021, section 3.3). Gate, capacity and balance loss see what they see without
it, so that losses are those of one process up to rounding.

Letters: S tokens, E experts, R processes, M model dim.
"""

from typing import Any, Callable, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_alma.moe.dispatch import Dispatch
from fairseq_alma.moe.experts import Experts
from fairseq_alma.training.spread_parameters import Slice, keep_checkpoints_whole, spread_of

Compute = Callable[[Tensor, Dispatch], Tensor]


class ExpertExchange:
    """Sends tokens to the processes that have their experts, and outputs back.

    Args:
        group: R processes; number r has the experts from r x E / R on. None: all.
        places: what the processes have agreed on for this batch, shared by all layers.
    """

    def __init__(self, group: Optional[dist.ProcessGroup] = None, places: Optional["Places"] = None) -> None:
        self.group = group
        self.places = places or Places()

    def __call__(self, x: Tensor, dispatch: Dispatch, compute: Compute) -> Tensor:
        """Apply the experts of all processes; all of them must call this together.

        Args:
            x: (S, M) tokens of this process.
            dispatch: which of the E experts takes which token.
            compute: applies the experts of this process to rows as a dispatch of its own says.

        Returns:
            (S, M); rows that no expert takes are zero.
        """
        if dispatch.capacity is not None and is_waiting_dear(x):
            return self._by_places(x, dispatch, self.places.agree(dispatch.capacity, x.device, self.group), compute)
        sent = dispatch.counts.view(dist.get_world_size(self.group), -1)  # (R, E / R)
        received = torch.empty_like(sent)  # from each process, for each expert here
        dist.all_to_all_single(received, sent, group=self.group)
        # the sizes of messages must be known to the host, which waits for the device
        to, back = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        taken = dispatch.order
        if dispatch.is_taken is not None:
            taken = taken[torch.nonzero_static(dispatch.is_taken[taken], size=sum(to)).squeeze(1)]
        rows = Exchange.apply(x[taken], to, back, self.group)
        num_own = sent.size(1)
        own = torch.arange(num_own, device=x.device).repeat(len(received))
        own = own.repeat_interleave(received.flatten(), output_size=sum(back))
        expert, order = torch.sort(own, stable=True)
        starts = F.pad(received.sum(0).cumsum(0, dtype=torch.int32), (1, 0))
        out = compute(rows, Dispatch(order, expert, None, starts))
        return x.new_zeros(x.shape).index_copy(0, taken, Exchange.apply(out, back, to, self.group))

    def _by_places(self, x: Tensor, dispatch: Dispatch, capacity: int, compute: Compute) -> Tensor:
        """Exchange all places of all experts, full or not: as many everywhere, so that no layer asks how many.

        With a capacity factor of 1 the places are as many as the tokens (GShard, algorithm 1).
        """
        num_experts, model_dim = len(dispatch.starts) - 1, x.size(1)
        size = dist.get_world_size(self.group)
        num_own, num_places = num_experts // size, num_experts * capacity
        slot = dispatch.slots(capacity)
        places = x.new_zeros(num_places + 1, model_dim).index_copy(0, slot, x.index_select(0, dispatch.order))
        sizes = [num_own * capacity] * size
        rows = Exchange.apply(places[:-1], sizes, sizes, self.group)  # of process 0, expert by expert, then of 1, …
        order = torch.arange(num_places, device=x.device).view(size, num_own, capacity).transpose(0, 1).flatten()
        starts = torch.arange(num_own + 1, device=x.device, dtype=torch.int32) * (size * capacity)
        expert = torch.arange(num_places, device=x.device) // (size * capacity)
        out = compute(rows, Dispatch(order, expert, None, starts, capacity=size * capacity))
        out = Exchange.apply(out, sizes, sizes, self.group)
        out = torch.cat([out, out.new_zeros(1, model_dim)])
        return out.index_select(0, slot[dispatch.rows_of_tokens()])


class Places:
    """The places of an expert, as many in all processes although their batches may differ; asked for once a batch."""

    def __init__(self) -> None:
        self._agreed: Optional[int] = None

    def begin_batch(self, *_: Any) -> None:
        """Forget what was agreed on; a model calls this before its forward pass."""
        self._agreed = None

    def agree(self, capacity: int, device: torch.device, group: Optional[dist.ProcessGroup]) -> int:
        """Return the largest capacity of all processes: the one wait of a batch, in its first Switch layer."""
        if self._agreed is None:
            largest = torch.full((1,), capacity, device=device)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            self._agreed = int(largest)
        return self._agreed


def is_waiting_dear(x: Tensor) -> bool:
    """Return whether a host that asks for a number makes the device run empty; on a CPU it costs nothing."""
    return x.is_cuda


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


def spread_experts(model: nn.Module, group: Optional[dist.ProcessGroup] = None) -> int:
    """Leave each process its share of the experts of all Switch layers; checkpoints hold all of them.

    Args:
        model: the same in every process.
        group: the processes; None: all.

    Returns:
        The number of layers whose experts are spread.

    Raises:
        ValueError: the number of processes does not divide that of the experts.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    size = dist.get_world_size(group)
    for name, experts in layers.items():
        if experts.num_experts % size:
            raise ValueError(f"{name} has {experts.num_experts} experts, which {size} processes cannot share evenly")
    places = Places()
    model.register_forward_pre_hook(places.begin_batch)
    for experts in layers.values():
        for name, whole in list(experts.named_parameters(recurse=False)):
            setattr(experts, name, Slice(whole, group).parameter)
        experts.exchange = ExpertExchange(group, places)
    keep_checkpoints_whole(model)
    spread: Any = [name for name, parameter in model.named_parameters() if spread_of(parameter) is not None]
    model._ddp_params_and_buffers_to_ignore = spread  # by torch's data parallel
    return len(layers)
