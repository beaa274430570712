"""Which expert is responsible for how much of the loss: the paper's rule for what to grow (v5, Appendix A).

Letters: S tokens or images, E experts.
"""

from dataclasses import dataclass, field
from typing import Iterable, Sequence

import torch
from torch import Tensor

from fairseq_alma.moe.gate import Routing


@dataclass
class ExpertLosses:
    """Sums over batches of held-out data, for every expert of every layer.

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
