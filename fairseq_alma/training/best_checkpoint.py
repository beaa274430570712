"""The best checkpoint of a stage is the one that is tested, and that the next stage begins with."""

from dataclasses import dataclass
from typing import Optional

from fairseq_alma.options import PLAN, opt
from fairseq_alma.training.feature import Feature


@dataclass
class BestCheckpoint(Feature):
    """Lets fairseq-train keep the checkpoint with the lowest loss on ``valid``."""

    best_checkpoint: Optional[bool] = opt(
        None,
        "test the checkpoint of a stage with the lowest loss on valid, of those that --save-every makes and the last; "
        "the next stage begins with it, unless the optimizer is carried on",
        kinds=("text",),
        side=PLAN,
    )

    @property
    def predicts_with(self) -> Optional[str]:
        """The best."""
        return "best" if self.best_checkpoint else None

    @property
    def way(self) -> Optional[str]:
        """The option."""
        return "--best-checkpoint" if self.best_checkpoint else None

    def words(self) -> list[str]:
        """Return fairseq's option."""
        return ["--best-checkpoint-metric", "nll_loss"]
