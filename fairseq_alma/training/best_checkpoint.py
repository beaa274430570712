"""``--best-checkpoint``: select the checkpoint with the lowest loss on ``valid`` in each stage."""

from dataclasses import dataclass
from typing import ClassVar, Optional

from fairseq_alma.options import PLAN, opt
from fairseq_alma.training.feature import Feature


@dataclass
class BestCheckpoint(Feature):
    """Feature that evaluates the checkpoint with the lowest loss on ``valid`` instead of the last checkpoint."""

    predicts_with: ClassVar[Optional[str]] = "best"

    best_checkpoint: Optional[bool] = opt(
        None,
        "evaluate the checkpoint with the lowest loss on valid, and start the next stage from this checkpoint",
        kinds=("text",),
        side=PLAN,
    )

    def words(self) -> list[str]:
        return ["--best-checkpoint-metric", "nll_loss"]
