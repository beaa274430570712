"""An ensemble of models of images; `alma_ensemble` builds it when an ensemble's members classify images.

Letters: B images, C channels, H and W height and width, K classes.
"""

from typing import Any, Optional, Sequence

import torch.nn.functional as F
from fairseq.models import BaseFairseqModel
from torch import Generator, Tensor, nn

from fairseq_alma.models.trained_members import TrainedMembers, log_of_mean


class ImageEnsemble(TrainedMembers, BaseFairseqModel):
    """Several trained models of images as one, for every stock command that does not train.

    Args:
        members: the models; they map (B, C, H, W) images to (B, K) logits.
        weights: what each member counts, at least 0, in all 1.
        embedded: the members whose weights are in the ensemble's own checkpoint.
    """

    members: Any  # an nn.ModuleList, which hides from mypy what is in it

    def __init__(self, members: Sequence[BaseFairseqModel], weights: Sequence[float], embedded: Sequence[int]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.weights = list(weights)
        self.embedded = frozenset(embedded)
        self.requires_grad_(False)

    @classmethod
    def build_ensemble(
        cls, members: Sequence[BaseFairseqModel], weights: Sequence[float], embedded: Sequence[int]
    ) -> "ImageEnsemble":
        """Build an ensemble; what `alma_ensemble` looks for in its members, which may be ensembles themselves."""
        return cls(members, weights, embedded)

    def trained_members(self) -> Sequence[nn.Module]:
        """Return the members."""
        return self.members

    def forward(self, images: Tensor, generator: Optional[Generator] = None) -> Tensor:
        """Classify (B, C, H, W) normalised images. Returns (B, K) log-probabilities in fp32, which serve as logits."""
        logits = (member(images, generator) for member in self.members)
        return log_of_mean((F.log_softmax(each.float(), dim=-1) for each in logits), self.weights)
