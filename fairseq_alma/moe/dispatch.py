"""Dispatch: the tokens of each expert under a capacity, and the losses of each expert.

Letters: S tokens (padding included) or images, E experts.
"""

import math
from dataclasses import dataclass, field
from typing import Iterable, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from fairseq_alma.moe.gate import Routing


class Dispatch(NamedTuple):
    """The tokens that each expert computes.

    Attributes:
        tokens: (K,) int64, indices of the tokens: those of expert 0 in token order, then those of expert 1, …
        counts: for each expert the number of its tokens; they sum to K.
        routed: for each expert the number of real tokens that the gate routes to it, including overflow.
    """

    tokens: Tensor
    counts: list[int]
    routed: list[int]


def expert_capacity(num_tokens: int, num_experts: int, capacity_factor: float) -> int:
    """Return C = ceil(capacity factor x tokens / experts) (Fedus et al. 2021, equation 3); at least 1."""
    # Round first: 1.1 * 10 / 1 is 11.000000000000002 in floating point, which must not add a place.
    return max(1, math.ceil(round(capacity_factor * num_tokens / num_experts, 6)))


def dispatch_tokens(routing: Routing, capacity_factor: float, padding: Optional[Tensor] = None) -> Dispatch:
    """Assign each token to its expert, in token order, until the expert is full.

    Args:
        routing: decision of the gate for S tokens.
        capacity_factor: capacity of an expert, as a multiple of an even share of the real tokens; 0: no limit.
        padding: (S,) bool, True where a token is padding, which gets no expert.
    """
    num_experts = routing.probs.size(1)
    expert = routing.expert if padding is None else routing.expert.masked_fill(padding, num_experts)
    routed = torch.bincount(expert, minlength=num_experts).tolist()[:num_experts]
    num_tokens = sum(routed)
    limit = expert_capacity(num_tokens, num_experts, capacity_factor) if capacity_factor > 0 else num_tokens
    by_expert = expert.argsort(stable=True)[:num_tokens].split(routed)
    return Dispatch(torch.cat([each[:limit] for each in by_expert]), [min(each, limit) for each in routed], routed)


@dataclass
class ExpertLosses:
    """Sums over batches of held-out data for each expert of each layer, which choose the experts to grow (paper v5, A).

    Attributes:
        losses: one (E,) tensor for each layer: sum of the losses of the tokens or images of each expert, in nats.
        counts: one (E,) tensor for each layer: number of these tokens or images.
    """

    losses: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)

    def add_routed(self, losses: Tensor, routings: Iterable[Routing], is_real: Tensor) -> None:
        """Add a batch in which each token goes to one expert in each layer.

        Args:
            losses: (S,), 0 for padding; its precision is that of the sums, which are on the CPU.
            routings: routing of each layer.
            is_real: (S,) bool, False for padding.
        """
        sums, counts = [], []
        for routing in routings:
            num_experts = routing.probs.size(1)
            sums.append(torch.bincount(routing.expert, weights=losses, minlength=num_experts).cpu())
            counts.append(torch.bincount(routing.expert[is_real], minlength=num_experts).cpu())
        self._add(sums, counts)

    def add_shared(self, losses: Tensor, shares: Sequence[Tensor]) -> None:
        """Add a batch in which the experts of a layer share the loss of each image.

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
