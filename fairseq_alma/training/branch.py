"""``--branch-share``: evaluate a branch (copy of the model whose learning rate decays to zero).

The training itself continues without decay. The schedule is warmup-stable-decay (Hu et al. 2024, MiniCPM); the decay
has the shape 1 - sqrt (Hägele et al. 2024).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional, Sequence

from fairseq_alma.options import PLAN, TRAINING, integer, opt, real
from fairseq_alma.training.feature import Feature, Part, PlannedRun

if TYPE_CHECKING:
    from torch import nn


def branch_factor(update: int, first: int, end: int) -> float:
    """Return the factor of the learning rate: 1 up to update ``first``, 0 from update ``end`` on."""
    return 1.0 - min(1.0, max(0.0, (update - first) / (end - first))) ** 0.5


@dataclass
class LRBranch(Feature):
    """Multiply the learning rate of each update by `branch_factor`."""

    owned = dict.fromkeys(("--branch-from", "--branch-until"), "give --branch-share before the --")

    branch_share: Optional[float] = opt(
        None,
        "evaluate a copy of the model whose learning rate decays to 0 over the last fraction S of all updates",
        range=real(0, 1, above=True, below=True),
        side=PLAN,
        metavar="S",
    )
    branch_from: Optional[int] = opt(None, "last update before the decay", range=integer(0), side=TRAINING)
    branch_until: Optional[int] = opt(None, "update with learning rate zero", range=integer(1), side=TRAINING)

    def __post_init__(self) -> None:
        self._groups: Sequence[dict[str, Any]] = ()
        self._rates: Sequence[float] = ()

    @property
    def copies(self) -> bool:
        """Return whether a branch is trained, evaluated and then deleted."""
        return self.branch_share is not None

    @property
    def predicts_with(self) -> Optional[str]:  # type: ignore[override]
        return "branch" if self.copies else None

    def check(self, run: PlannedRun) -> None:
        run.require_updates("--branch-share")
        run.require_endless(f"--branch-share {self.branch_share:g}")

    def num_updates(self, of_stage: int, before: int = 0) -> int:
        """Return the number of updates with a decaying learning rate in a stage.

        The number is at least one and less than all updates of the stage, because the branch starts from a checkpoint
        within the stage. ``before`` is the number of updates of the optimizer before the stage.
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
            for group in self._groups:
                group["lr"] *= branch_factor(update, self.branch_from, self.branch_until)

    def after_step(self, model: "nn.Module", update: int) -> None:
        for group, rate in zip(self._groups, self._rates, strict=True):  # needed without a learning-rate schedule
            group["lr"] = rate
