"""Which tokens an expert takes, and in which order: capacity, overflow, positions; and how much of the loss they are.

Letters: S tokens (padding included) or images, E experts, C capacity.
"""

import math
from dataclasses import dataclass, field
from typing import Iterable, NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor

from fairseq_alma.moe.gate import Routing
from fairseq_alma.moe.places import places_of_tokens


class Dispatch(NamedTuple):
    """Where each token goes; rows are tokens in the order of their experts.

    Attributes:
        order: (S,) int64, token indices: those routed to expert 0, in token order, then those to expert 1, …, last
            padding.
        expert: (S,) int64, of each row; E for padding.
        is_taken: (S,) bool, whether a token (not a row) is taken by its expert: it is not overflow, which stands behind
            what its expert takes, and not padding. None: all are taken.
        starts: (E + 1,) int32, the first row of each expert, and of padding.
        limit: the most tokens that an expert takes, a number or a scalar; None: there is no limit.
        capacity: a bound on ``counts`` that is known without asking the device, or None without a limit.
        has_padding: whether some rows may be padding.
        rows: (S,) int64, the row of each token, where it is known already.
        place: (S,) int64, where experts are computed by places (see `places`): that of each token. Then ``is_taken``
            and ``rows`` are not known.
    """

    order: Tensor
    expert: Tensor
    is_taken: Optional[Tensor]
    starts: Tensor
    limit: Union[int, Tensor, None] = None
    capacity: Optional[int] = None
    has_padding: bool = False
    rows: Optional[Tensor] = None
    place: Optional[Tensor] = None

    @property
    def routed(self) -> Tensor:
        """The number of real tokens whose best expert this is, overflow included, (E,) int32."""
        return self.starts.diff()

    @property
    def counts(self) -> Tensor:
        """The number of tokens that each expert takes, (E,) integers."""
        return self.routed if self.limit is None else self.routed.clamp(max=self.limit)

    def slots(self, capacity: int) -> Tensor:
        """Return the place of each row among E x C places, (S,) int64; E x C for rows that nobody takes.

        Args:
            capacity: C; at least the largest of ``counts``.
        """
        num_experts = len(self.starts) - 1
        expert = self.expert.clamp(max=num_experts - 1) if self.has_padding else self.expert
        slot = expert * capacity + torch.arange(len(expert), device=expert.device) - self.starts[expert]
        if self.is_taken is None:
            return slot
        return slot.masked_fill(~self.is_taken[self.order], num_experts * capacity)

    def taken(self) -> Tensor:
        """Return the token indices of the rows that an expert takes; asks the device how many, unless all are."""
        return self.order if self.is_taken is None else self.order[self.is_taken[self.order]]

    def rows_of_tokens(self) -> Tensor:
        """Return the row of each token, (S,) int64: the inverse of ``order``."""
        return _inverse(self.order) if self.rows is None else self.rows


def _inverse(order: Tensor, numbers: Optional[Tensor] = None) -> Tensor:
    numbers = torch.arange(len(order), device=order.device) if numbers is None else numbers[: len(order)]
    return torch.empty_like(order).scatter_(0, order, numbers)


def expert_capacity(num_tokens: int, num_experts: int, capacity_factor: float) -> int:
    """Return C = ceil(capacity factor x tokens / experts) (Fedus et al. 2021, equation 3); at least 1."""
    # Rounding first: 1.1 * 10 / 1 is 11.000000000000002 in floating point, and no expert should gain a place by that.
    return max(1, math.ceil(round(capacity_factor * num_tokens / num_experts, 6)))


def dispatch_tokens(
    routing: Routing,
    capacity_factor: float,
    padding: Optional[Tensor] = None,
    numbers: Optional[Tensor] = None,
    by_places: bool = False,
) -> Dispatch:
    """Give every token its place, in token order, until its expert is full.

    Args:
        routing: the gate's decision for S tokens.
        capacity_factor: places per expert, as a multiple of an even share of the real tokens; 0 means no limit.
        padding: (S,) bool, True where a token is padding: it takes no place.
        numbers: those from 0 on, (max(S, E + 1),) int64 or more, if the caller has them.
        by_places: experts, which have a capacity, are computed by places.
    """
    num_experts = routing.probs.size(1)
    nobody = num_experts  # stands for "no expert" wherever experts are counted or sorted
    expert = routing.expert if padding is None else routing.expert.masked_fill(padding, nobody)
    expert, order = torch.sort(expert, stable=True)
    if numbers is None:
        numbers = torch.arange(max(len(expert), num_experts + 1), device=expert.device)
    # Nothing here waits for the device, as `torch.bincount` and indexing by a condition would.
    starts = torch.searchsorted(expert, numbers[: num_experts + 1], out_int32=True)
    if capacity_factor <= 0:
        is_real = None if padding is None else ~padding
        return Dispatch(order, expert, is_real, starts, has_padding=padding is not None)
    bound = expert_capacity(len(expert), num_experts, capacity_factor)
    if by_places:
        limit = bound if padding is None else _capacity_of(starts[-1], num_experts, capacity_factor)
        place = places_of_tokens(order, expert, starts, limit, bound, numbers)
        return Dispatch(order, expert, None, starts, limit, bound, padding is not None, place=place)
    rows = _inverse(order, numbers)
    if padding is None:
        is_taken = rows < (starts + bound)[routing.expert]
        return Dispatch(order, expert, is_taken, starts, bound, bound, False, rows)
    # Only where padding hides the number of tokens must the capacity be computed on the device.
    capacity = _capacity_of(starts[-1], num_experts, capacity_factor)
    is_taken = (rows < (starts + capacity)[routing.expert]) & ~padding
    return Dispatch(order, expert, is_taken, starts, capacity, bound, True, rows)


def _capacity_of(num_tokens: Tensor, num_experts: int, capacity_factor: float) -> Tensor:
    """Compute `expert_capacity` as a scalar tensor on the device, from the number of real tokens."""
    share = num_tokens.double() * capacity_factor / num_experts
    return torch.ceil(torch.round(share, decimals=6)).long().clamp(min=1)


@dataclass
class ExpertLosses:
    """Sums over batches of held-out data, for every expert of every layer (paper v5, Appendix A: what grows).

    Attributes:
        losses: one (E,) tensor per layer: sum of the losses of what each expert got, in nats.
        counts: one (E,) tensor per layer: how much that was, in tokens or images.
    """

    losses: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)

    def add_routed(self, losses: Tensor, routings: Iterable[Routing], is_real: Tensor) -> None:
        """Add a batch each of whose tokens goes to one expert in each layer.

        Args:
            losses: (S,), 0 for padding; sums are kept in its precision, on the CPU.
            routings: of each layer.
            is_real: (S,) bool, False for padding, which does not count.
        """
        sums, counts = [], []
        for routing in routings:
            num_experts = routing.probs.size(1)
            sums.append(torch.bincount(routing.expert, weights=losses, minlength=num_experts).cpu())
            counts.append(torch.bincount(routing.expert[is_real], minlength=num_experts).cpu())
        self._add(sums, counts)

    def add_shared(self, losses: Tensor, shares: Sequence[Tensor]) -> None:
        """Add a batch whose images go through several experts of a layer, which share each image's loss.

        Args:
            losses: (S,).
            shares: (S, E) for each layer, in the precision of the losses; rows sum to 1.
        """
        self._add([losses @ each for each in shares], [each.sum(dim=0) for each in shares])

    def _add(self, sums: list[Tensor], counts: list[Tensor]) -> None:
        if not self.losses:
            self.losses, self.counts = sums, counts
            return
        self.losses = [before + now for before, now in zip(self.losses, sums, strict=True)]
        self.counts = [before + now for before, now in zip(self.counts, counts, strict=True)]
