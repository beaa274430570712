"""Anytime training: what runs on from stage to stage, and which model is tested at each arrival.

Without any of these options every stage begins with a new optimizer, step count and schedule, and its last weights are
tested, as in the paper.
"""

from dataclasses import dataclass
from typing import Any, Optional, Sequence

from fairseq_alma.learners.plan import StagePlan
from fairseq_alma.options import Options, opt, real

HALF_LIVES = ("1/32", "1/16", "1/8")
SHAPES = ("sqrt", "linear")
REWARMS = ("full", "one-schedule")
LEAST_SEEN = "least-seen"
REPLAY_ORDERS = ("uniform", LEAST_SEEN)
SHARE = real(0, 1, above=True, below=True)
TEXT = ("text",)


@dataclass(frozen=True)
class AnytimeOptions(Options):
    """Options of alma-stream on text; a field that is None was not given."""

    carry_optimizer: Optional[bool] = opt(
        None,
        "optimizer state, number of updates and learning-rate schedule run on through the stages, each of which makes "
        "--max-update more; with --lr-scheduler fixed or inverse_sqrt (default: each stage begins anew)",
        kinds=TEXT,
    )
    ema_half_life: Optional[str] = opt(
        None,
        "test a moving average of the weights; its half-life is this share of the updates so far (default: test the "
        "weights)",
        choices=HALF_LIVES,
        kinds=TEXT,
    )
    branch_decay: Optional[float] = opt(
        None,
        "test a copy whose learning rate decays to zero over the last share D of a stage's updates; training goes on "
        "from weights that did not decay",
        range=SHARE,
        kinds=TEXT,
        metavar="D",
    )
    branch_shape: Optional[str] = opt(
        None, f"of that decay: 1 - sqrt, or linear (default: {SHAPES[0]})", choices=SHAPES, kinds=TEXT
    )
    branch_continue: Optional[bool] = opt(
        None, "with --branch-decay: decay the model itself and go on from there", kinds=TEXT
    )
    best_checkpoint: Optional[bool] = opt(
        None,
        "test the checkpoint of a stage with the lowest loss on valid, of those that --save-every makes and the last; "
        "the next stage begins with it, unless the optimizer is carried on",
        kinds=TEXT,
    )
    replay_share: Optional[float] = opt(
        None,
        "share of a stage's sequences that come from earlier mega-batches; the updates do not grow",
        range=SHARE,
        kinds=TEXT,
        metavar="R",
    )
    replay_order: Optional[str] = opt(
        None,
        "with --replay-share: draw them from all earlier ones, or first those that were in the fewest stages so far "
        f"(default: {REPLAY_ORDERS[0]})",
        choices=REPLAY_ORDERS,
        kinds=TEXT,
    )
    rewarm: Optional[str] = opt(
        None,
        "what the learning rate of each stage warms up to: --lr, or what one schedule over all stages so far would "
        f"have (default: {REWARMS[0]})",
        choices=REWARMS,
        kinds=TEXT,
    )

    def record(self, kind: Optional[str] = None) -> dict[str, Any]:
        """Return what run.json says: what was given, so that a run without any of it has the record it always had."""
        shape = {} if self.branch_decay is None else {"branch_shape": self.shape}
        return super().record(kind) | shape

    @property
    def shape(self) -> str:
        """Shape of a branch's decay."""
        return self.branch_shape or SHAPES[0]

    @property
    def copies_branch(self) -> bool:
        """Whether a copy is decayed, tested and thrown away."""
        return self.branch_decay is not None and not self.branch_continue

    @property
    def predicts_with(self) -> str:
        """What is tested of a stage: its ``last`` weights, the ``best``, an ``average``, or those of a ``branch``."""
        if self.ema_half_life is not None:
            return "average"
        if self.best_checkpoint:
            return "best"
        return "branch" if self.copies_branch else "last"

    def peak(self, stage: int, num_updates: int, warmup: int, power: float = 1.0) -> float:
        """Return the peak of a stage's learning rate as a share of that of the first stage.

        With ``one-schedule`` it is the value at update i S + W of a polynomial decay over (i + 1) S updates.

        Args:
            stage: i, from 0.
            num_updates: S, of each stage.
            warmup: W, updates of the warm-up.
            power: of the decay.
        """
        if self.rewarm != "one-schedule":
            return 1.0
        return (1 - stage * num_updates / ((stage + 1) * num_updates - warmup)) ** power

    def branch_updates(self, num_updates: int) -> int:
        """Return how many of a stage's updates are made with a decaying learning rate, at least one."""
        assert self.branch_decay is not None
        return max(1, round(self.branch_decay * num_updates))

    def check(self) -> None:
        """Raise ValueError, which begins with the option, if options contradict each other."""
        if self.branch_decay is None:
            for name in ("branch_shape", "branch_continue"):
                if getattr(self, name) is not None:
                    raise ValueError(f"--{name.replace('_', '-')}: means nothing without --branch-decay; give both")
        if self.replay_order is not None and self.replay_share is None:
            raise ValueError("--replay-order: means nothing without --replay-share; give both")
        ways = {
            f"--ema-half-life {self.ema_half_life}": self.ema_half_life is not None,
            "--branch-decay": self.branch_decay is not None,
            "--best-checkpoint": bool(self.best_checkpoint),
        }
        given = [flag for flag, is_given in ways.items() if is_given]
        if len(given) > 1:
            raise ValueError(f"{given[0]}: {given[1]} is another way to the model that is tested; give one of them")
        if self.rewarm == "one-schedule" and self.carry_optimizer:
            raise ValueError("--rewarm one-schedule: --carry-optimizer warms up once, so there is nothing to re-warm")

    def check_plans(self, plans: Sequence[StagePlan], replay: bool) -> None:
        """Raise ValueError if no stage has anything to carry on, or to replay.

        Args:
            plans: of all stages.
            replay: whether each stage trains on all mega-batches so far.
        """
        if self.replay_share is not None and (replay or len(plans) == 1):
            what = "--replay trains on all mega-batches already" if replay else "there is one stage, and none before it"
            raise ValueError(f"--replay-share {self.replay_share:g}: {what}; leave it out")
        if self.carry_optimizer and not any(each.start for plan in plans[1:] for each in plan.trainings):
            what = "there is one stage" if len(plans) == 1 else "each stage begins with new weights"
            raise ValueError(f"--carry-optimizer: {what}, so there is no optimizer to carry on; leave it out")


PAPERS_WAY = AnytimeOptions()
"""Every stage begins anew, and its last weights are tested."""
