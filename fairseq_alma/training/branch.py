"""``--branch-share``: evaluate a branch (copy of the model, trained with a learning rate that decays to zero).

The learning rate of the main training does not decay. The schedule is warmup-stable-decay (Hu et al. 2024, MiniCPM),
with the 1 - sqrt decay (Hägele et al. 2024).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Optional, Sequence

from fairseq_alma.options import PLAN, TRAINING, integer, opt, real
from fairseq_alma.training.feature import Feature, Part, PlannedRun

if TYPE_CHECKING:
    from torch import nn


@dataclass
class LRBranch(Feature):
    """Feature that decays the learning rate of the branch to zero, from update ``branch_from`` to ``branch_until``."""

    predicts_with: ClassVar[Optional[str]] = "branch"
    owned = dict.fromkeys(("--branch-from", "--branch-until"), "give --branch-share before the --")

    branch_share: Optional[float] = opt(
        None,
        "decay the learning rate to 0 over the last fraction S of all updates, in a model copy for evaluation",
        range=real(0, 1, above=True, below=True),
        side=PLAN,
        metavar="S",
    )
    branch_from: Optional[int] = opt(None, "last update before the decay", range=integer(0), side=TRAINING)
    branch_until: Optional[int] = opt(None, "first update with learning rate zero", range=integer(1), side=TRAINING)
    _groups: Sequence[dict[str, Any]] = field(default=(), init=False)
    _rates: Sequence[float] = field(default=(), init=False)

    def check(self, run: PlannedRun) -> None:
        run.require_updates("--branch-share")
        run.require_endless(f"--branch-share {self.branch_share:g}")

    def num_updates(self, of_stage: int, before: int = 0) -> int:
        """Return the number of updates of the branch.

        The branch starts from a checkpoint within the stage, so the result is less than ``of_stage`` (but at least 1).

        Args:
            of_stage: number of updates of the stage.
            before: number of updates before the stage.
        """
        assert self.branch_share is not None
        return max(1, round(min(self.branch_share * (before + of_stage), of_stage - 1)))

    def for_part(self, part: Part) -> "LRBranch":
        if part.num_updates is None or not part.is_branch:
            return LRBranch()
        end = part.first_update + part.num_updates
        return LRBranch(branch_from=end - self.num_updates(part.num_updates, part.first_update), branch_until=end)

    def describe(self, part: Part) -> dict[str, Any]:
        count = part.num_updates
        return {} if count is None else {"branch_updates": self.num_updates(count, part.first_update)}

    def before_step(self, optimizer: Any, update: int) -> None:
        if self.branch_from is not None and self.branch_until is not None:
            self._groups = optimizer.param_groups
            self._rates = [group["lr"] for group in self._groups]
            progress = (update - self.branch_from) / (self.branch_until - self.branch_from)
            for group in self._groups:
                group["lr"] *= 1.0 - min(1.0, max(0.0, progress)) ** 0.5

    def after_step(self, model: "nn.Module", update: int) -> None:
        for group, rate in zip(self._groups, self._rates, strict=True):  # for images, no scheduler resets the rate
            group["lr"] = rate
