"""Assign tokens to experts of limited capacity, and sum the losses of each expert.

Letters: S tokens (padding included) or images, E experts.
"""

import math
from dataclasses import dataclass, field
from typing import Iterable, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from fairseq_alma.moe.gate import Routing


class Dispatch(NamedTuple):
    """Assignment of tokens to experts.

    Attributes:
        tokens: (K,) int64, token indices, grouped by expert and ascending within each expert.
        counts: number of tokens assigned to each expert; the sum is K.
        routed: number of non-padding tokens that the gate routes to each expert, including tokens over capacity.
    """

    tokens: Tensor
    counts: list[int]
    routed: list[int]


def dispatch_tokens(routing: Routing, capacity_factor: float, padding: Optional[Tensor] = None) -> Dispatch:
    """Assign tokens to the experts that the gate selected. If an expert is full, later tokens get no expert.

    The capacity is ceil(capacity factor x non-padding tokens / experts) (Fedus et al. 2021, equation 3), at least 1.

    Args:
        routing: routing of S tokens.
        capacity_factor: capacity of an expert, as a multiple of non-padding tokens / experts; 0: no limit.
        padding: (S,) bool, True for padding tokens, which get no expert; None: no padding.
    """
    num_experts = routing.probs.size(1)
    expert = routing.expert if padding is None else routing.expert.masked_fill(padding, num_experts)
    routed = torch.bincount(expert, minlength=num_experts).tolist()[:num_experts]
    num_tokens = limit = sum(routed)
    if capacity_factor > 0:  # rounded first: 1.1 * 10 / 1 is 11.000000000000002, which must not increase the capacity
        limit = max(1, math.ceil(round(capacity_factor * num_tokens / num_experts, 6)))
    by_expert = expert.argsort(stable=True)[:num_tokens].split(routed)
    return Dispatch(torch.cat([each[:limit] for each in by_expert]), [min(each, limit) for each in routed], routed)


@dataclass
class ExpertLosses:
    """Loss of each expert of each layer on held-out data, to select the experts to grow (paper v5, Appendix A).

    Attributes:
        losses: for each layer, loss in nats, summed over the tokens or images of each expert, (E,).
        counts: for each layer, number of tokens or images of each expert, (E,).
    """

    losses: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)

    def add_routed(self, losses: Tensor, routings: Iterable[Routing], is_real: Tensor) -> None:
        """Add a batch in which each layer routes each token to one expert.

        Args:
            losses: (S,) loss of each token, 0 for padding.
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
        """Add a batch in which the loss of each image is divided among the experts of a layer.

        Args:
            losses: loss of each image, (S,).
            shares: for each layer, weights of the experts for each image, (S, E); rows sum to 1.
        """
        self._add([losses @ each for each in shares], [each.sum(dim=0) for each in shares])

    def _add(self, sums: list[Tensor], counts: list[Tensor]) -> None:
        if not self.losses:
            self.losses, self.counts = sums, counts
            return
        self.losses = [before + now for before, now in zip(self.losses, sums, strict=True)]
        self.counts = [before + now for before, now in zip(self.counts, counts, strict=True)]
