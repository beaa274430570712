"""FF: a VGG network whose layers get more neurons, split and added by gradient score (Wu et al. 2020)."""

from dataclasses import dataclass
from typing import ClassVar, Optional

from fairseq_alma.learners.growing_mixture import grow_every_option
from fairseq_alma.learners.learner import GrowingModel, is_growth_due, register_learner
from fairseq_alma.learners.plan import Growth, Stage
from fairseq_alma.options import opt, real


@register_learner("firefly", "images")
@dataclass(frozen=True)
class Firefly(GrowingModel):
    """A VGG network whose layers get more neurons, a fixed share of the first size each time."""

    label: ClassVar[Optional[str]] = "FF"
    arch_prefix: ClassVar[Optional[str]] = "alma_firefly"
    image_architectures: ClassVar[tuple[str, str]] = ("alma_firefly_vgg", "alma_firefly_vgg")

    grow_every: int = grow_every_option()
    grow_share: float = opt(
        0.25, "what a growth step adds, as a share of the first size", range=real(0, 1000, above=True), metavar="X"
    )
    grow_share_of: str = opt(
        "parameters",
        "what --grow-share counts: parameters, as the paper's Appendix B.1 has it, or neurons, as its released code "
        "does",
        choices=("parameters", "neurons"),
        quiet=True,
    )

    def growth_before(self, stage: Stage, seed: int) -> Optional[Growth]:
        """Add neurons."""
        if not is_growth_due(stage, self.wait, self.grow_every):
            return None
        return Growth(1, "firefly", "loss", seed, self.grow_share, self.grow_share_of)
