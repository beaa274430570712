"""A branch: the learning rate of the last updates goes down to zero, whatever schedule it follows before.

Source: warmup-stable-decay (Hu et al. 2024, MiniCPM); the shape 1 - sqrt is that of Hägele et al. 2024.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Mapping, Optional, Sequence

from fairseq_alma.options import PLAN, TRAINING, opt, real, whole
from fairseq_alma.training.carried_optimizer import CarriedOptimizer
from fairseq_alma.training.feature import Feature, Part, PlannedRun

if TYPE_CHECKING:
    from torch import nn

SHAPES = ("sqrt", "linear")


def branch_factor(update: int, first: int, end: int, shape: str) -> float:
    """Return what the learning rate of an update is multiplied by.

    Args:
        update: its number, from 0.
        first: the first update of the branch; it and those before have the factor 1.
        end: the update at which the learning rate would be 0; the one before is the last.
        shape: ``sqrt`` or ``linear``.
    """
    progress = min(1.0, max(0.0, (update - first) / (end - first)))
    return 1.0 - (progress**0.5 if shape == "sqrt" else progress)


@dataclass
class LRBranch(Feature):
    """Multiplies the learning rate of each update by `branch_factor`, for that update alone."""

    owned: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("--branch-from", "--branch-until"), "give --branch-decay before the --"
    )

    branch_decay: Optional[float] = opt(
        None,
        "test a copy whose learning rate decays to zero over the last share D of a stage's updates; training goes on "
        "from weights that did not decay",
        range=real(0, 1, above=True, below=True),
        side=PLAN,
        metavar="D",
    )
    branch_share: Optional[float] = opt(
        None,
        "with --carry-optimizer: as --branch-decay, over the last share S of all updates so far, but never more than "
        "those of the stage: the copy branches off after its first update at the earliest",
        range=real(0, 1, above=True, below=True),
        kinds=("text",),
        side=PLAN,
        metavar="S",
    )
    branch_from: Optional[int] = opt(
        None, "decay the learning rate from this update on, whatever the schedule says", range=whole(0), side=TRAINING
    )
    branch_until: Optional[int] = opt(None, "to zero at this update", range=whole(1), side=TRAINING)
    branch_shape: Optional[str] = opt(
        None,
        f"of that decay: 1 - sqrt, or linear (default: {SHAPES[0]})",
        choices=SHAPES,
        defaults={TRAINING: SHAPES[0]},
    )
    branch_continue: Optional[bool] = opt(
        None, "with --branch-decay or --branch-share: decay the model itself and go on from there", side=PLAN
    )

    def __post_init__(self) -> None:
        if self.way is not None or self.branch_from is not None:
            self.branch_shape = self.branch_shape or SHAPES[0]
        self._groups: Sequence[dict[str, Any]] = ()
        self._rates: Sequence[float] = ()

    @property
    def copies(self) -> bool:
        """Whether a copy is decayed, tested and thrown away (WSD), rather than trained on from (WSD-S)."""
        return self.way is not None and not self.branch_continue

    @property
    def predicts_with(self) -> Optional[str]:
        """The copy, if there is one."""
        return "branch" if self.copies else None

    @property
    def way(self) -> Optional[str]:
        """The option."""
        given = {"--branch-decay": self.branch_decay, "--branch-share": self.branch_share}
        return next((name for name, value in given.items() if value is not None), None)

    def check(self, run: PlannedRun) -> None:
        """Refuse options that mean nothing alone, and schedules that decay by themselves."""
        if self.way is None:
            name = "--branch-shape" if self.branch_shape is not None else "--branch-continue"
            raise ValueError(f"{name}: means nothing without --branch-decay; give both")
        if self.branch_share is not None and self.branch_decay is not None:
            raise ValueError("--branch-share: --branch-decay says another way how long the decay is; give one of them")
        if self.branch_share is not None and not run.features[CarriedOptimizer].carry_optimizer:
            raise ValueError(
                "--branch-share: counts the updates of all stages, which are one training with --carry-optimizer "
                "alone; give both, or --branch-decay for a share of each stage"
            )
        run.require_updates(self.way)
        run.require_endless(f"{self.way} {self.branch_decay or self.branch_share:g}")

    def num_updates(self, of_stage: int, before: int = 0) -> int:
        """Return how many of a stage's updates are made with a decaying learning rate, at least one.

        The last share of all updates so far may begin before the stage; but the weights of then are gone, and a copy
        of them would be trained once more on what the model has behind it. So the decay takes no more than the stage;
        and a copy, which needs a checkpoint to branch off from, all but one update.

        Args:
            of_stage: updates that the stage makes.
            before: updates that the optimizer has made before it.
        """
        if self.branch_share is not None:
            number = min(self.branch_share * (before + of_stage), of_stage - int(self.copies))
        else:
            assert self.branch_decay is not None
            number = self.branch_decay * of_stage
        return max(1, round(number))

    def for_part(self, part: Part) -> "LRBranch":
        """Return the decay of the copy, or of the whole that goes on from it; elsewhere there is none."""
        if part.num_updates is None or part.is_branch != self.copies:
            return LRBranch()
        end = part.first_update + part.num_updates
        first = end - self.num_updates(part.num_updates, part.first_update)
        return LRBranch(branch_from=first, branch_until=end, branch_shape=self.branch_shape)

    def describe(self, part: Part) -> dict[str, Any]:
        """Return how many updates have a decaying learning rate."""
        if self.way is None or part.num_updates is None:
            return {}
        return {"branch_updates": self.num_updates(part.num_updates, part.first_update)}

    def before_step(self, optimizer: Any, update: int) -> None:
        """Lower the learning rate."""
        if self.branch_from is None or self.branch_until is None:
            return
        factor = branch_factor(update, self.branch_from, self.branch_until, self.branch_shape or SHAPES[0])
        self._groups = optimizer.param_groups
        self._rates = [group["lr"] for group in self._groups]
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def after_step(self, model: "nn.Module", update: int) -> None:
        """Set the learning rate back: a loop without a schedule does not set it anew for each update."""
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate
