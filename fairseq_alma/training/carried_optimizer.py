"""A training that goes on from another one with all that it has, and counts its own updates and tokens from zero.

fairseq knows two ways to begin with a checkpoint: with its weights alone, and resuming, of which ``--continue-once`` is
a form: weights, optimizer, number of updates, schedule, and the place in the data. A stage that carries the optimizer
on takes all but the place in the data; a branch takes that too. Later launches resume from the training's own last
checkpoint, to which none of this applies.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Mapping, Optional, Sequence

from fairseq_alma.checkpoints import FIRST_UPDATE, TASK_STATE, TRAIN_TOKENS
from fairseq_alma.checkpoints.model_options import WEIGHTS_FLAG
from fairseq_alma.errors import AlmaError
from fairseq_alma.options import PLAN, TRAINING, opt
from fairseq_alma.training.feature import ENDLESS, Feature, PlannedRun, Setting

RESUME, STAGE, BRANCH = "resume", "stage", "branch"
WAYS = (RESUME, STAGE, BRANCH)
GROWABLE = ("adam", "fused_adam", "muon")
"""Optimizers whose state is known well enough to be shared between the halves of an expert."""
REWARMS = ("full", "one-schedule")


@dataclass
class TokenCount(Feature):
    """Counts the tokens that a model was trained on, so that a stage that was cut off counts each one once.

    fairseq's own meters do not serve: they begin anew when a training is resumed at the start of an epoch.
    """

    @property
    def is_on(self) -> bool:
        """Whatever the options."""
        return True

    def __post_init__(self) -> None:
        self.num_tokens: Any = 0
        self.first_update = 0

    def count(self, logs: Sequence[Mapping[str, Any]]) -> None:
        """Count the tokens of an update, of all processes."""
        # A sum over processes is a tensor and stays one: asking a GPU for its value after each update stalls it.
        self.num_tokens = self.num_tokens + sum(log["ntokens"] for log in logs)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {TRAIN_TOKENS: int(self.num_tokens)} | ({FIRST_UPDATE: self.first_update} if self.first_update else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the count; not called when a stage begins with weights alone."""
        self.num_tokens, self.first_update = state[TRAIN_TOKENS], state.get(FIRST_UPDATE, 0)


@dataclass
class CarriedOptimizer(Feature):
    """Begins a stage, or a branch, with the optimizer, number of updates and schedule of the checkpoint before."""

    owned: ClassVar[Mapping[str, str]] = {"--continue-as": "give --carry-optimizer before the --"}

    carry_optimizer: Optional[bool] = opt(
        None,
        "optimizer state, number of updates and learning-rate schedule run on through the stages, each of which makes "
        "--max-update more; with --lr-scheduler fixed or inverse_sqrt (default: each stage begins anew)",
        kinds=("text",),
        side=PLAN,
    )
    continue_as: Optional[str] = opt(
        None,
        "what --continue-once means: resume (fairseq's), begin a new stage with its optimizer, number of updates and "
        "schedule on new data (stage), or the same on the batches that come next (branch)",
        choices=WAYS,
        side=TRAINING,
        defaults={TRAINING: RESUME},
    )

    def check(self, run: PlannedRun) -> None:
        """Refuse a run with nothing to carry on, a schedule that ends before it, a state that cannot grow."""
        trainings = [each for plan in run.plans[1:] for each in plan.trainings]
        if len(run.plans) > 1 and not any(each.start for each in trainings):  # to one stage others may be appended
            raise ValueError(
                "--carry-optimizer: each stage begins with new weights, so there is no optimizer to carry on; leave it "
                "out"
            )
        run.require_updates("--carry-optimizer")
        _require_whole_stream(run)
        optimizer = " ".join(run.last("--optimizer") or ())
        if optimizer not in GROWABLE and any(each.growth for each in trainings):
            raise ValueError(
                f"--carry-optimizer: the state of --optimizer {optimizer or '(none given)'} is not known to grow with "
                f"a model; give {' or '.join(GROWABLE)} after the --"
            )

    def prepare(self, setting: Setting) -> None:
        """Refuse to begin with nothing."""
        if setting.start is None:
            raise AlmaError(f"--continue-as {self.continue_as}: give the checkpoint to begin with as --continue-once")

    def begin(self, checkpoint: dict[str, Any], setting: Setting) -> None:
        """Make the checkpoint the beginning of a training that has made no update of its own."""
        assert setting.start is not None
        found = checkpoint["optimizer_history"][-1]["optimizer_name"]
        if setting.optimizer not in (None, found):
            raise AlmaError(
                f"{setting.start}: trained with {found}, the command trains with {setting.optimizer}, which cannot "
                f"carry its state on; give the same --optimizer, or the checkpoint as {WEIGHTS_FLAG}"
            )
        begin(checkpoint, setting.start, with_new_data=self.continue_as == STAGE)


@dataclass
class Rewarm(Feature):
    """Where each stage warms up, and to what."""

    rewarm: Optional[str] = opt(
        None,
        "what the learning rate of each stage warms up to: --lr, or what one schedule over all stages so far would "
        f"have (default: {REWARMS[0]})",
        choices=REWARMS,
        kinds=("text",),
        side=PLAN,
    )

    @property
    def is_one_schedule(self) -> bool:
        """Whether stages differ in their peaks."""
        return self.rewarm == "one-schedule"

    def check(self, run: PlannedRun) -> None:
        """Refuse schedules of whose value at an update nothing is known here."""
        if not self.is_one_schedule:
            return
        flag = "--rewarm one-schedule"
        if run.features[CarriedOptimizer].carry_optimizer:
            raise ValueError(f"{flag}: --carry-optimizer warms up once, so there is nothing to re-warm")
        run.require_updates(flag)
        if run.schedule != "polynomial_decay" or run.number("--total-num-update") != run.max_update:
            raise ValueError(
                f"{flag}: needs --lr-scheduler polynomial_decay after the --, with a --total-num-update of --max-update"
            )
        if (run.number("--end-learning-rate") or 0.0) > 0 or len(run.last("--lr") or ()) != 1:
            raise ValueError(f"{flag}: needs one --lr after the --, and an --end-learning-rate of 0")
        run.refuse_rates_by_epoch(flag)

    def peak(self, stage: int, num_updates: int, warmup: int, power: float = 1.0) -> float:
        """Return the peak of a stage's learning rate as a share of that of the first stage.

        With ``one-schedule`` it is the value at update i S + W of a polynomial decay over (i + 1) S updates.

        Args:
            stage: i, from 0.
            num_updates: S, of each stage.
            warmup: W, updates of the warm-up.
            power: of the decay.
        """
        if not self.is_one_schedule:
            return 1.0
        return (1 - stage * num_updates / ((stage + 1) * num_updates - warmup)) ** power


def _require_whole_stream(run: PlannedRun) -> None:
    """Refuse schedules that end before the stream does."""
    if run.schedule in ENDLESS:
        run.refuse_rates_by_epoch("--carry-optimizer")
        return
    if run.schedule != "polynomial_decay":
        raise ValueError(
            f"--carry-optimizer: --lr-scheduler {run.schedule} after the -- knows no stream of several stages; give "
            f"{' or '.join(ENDLESS)}, or polynomial_decay with a --total-num-update for all of it"
        )
    total, needed = run.number("--total-num-update"), len(run.plans) * (run.max_update or 0)
    if total is None or total < needed:
        raise ValueError(
            f"--carry-optimizer: --total-num-update {'' if total is None else f'{total:g} '}after the --, and the "
            f"{len(run.plans)} stages make {needed:,} updates in all; give at least that, or --lr-scheduler fixed"
        )


def begin(checkpoint: dict[str, Any], path: str, with_new_data: bool) -> None:
    """Make a checkpoint the beginning of a training that has made no update of its own.

    Args:
        checkpoint: as `read_checkpoint` returns it; changed in place.
        path: its file, for the message.
        with_new_data: begin with the first batch, not with the next one.

    Raises:
        AlmaError: it has no optimizer state.
    """
    if checkpoint.get("last_optimizer_state") is None:
        raise AlmaError(
            f"{path}: has no optimizer state, so a training cannot carry it on; give it as {WEIGHTS_FLAG}, or "
            "keep the state where the checkpoint is made"
        )
    state: dict[str, Any] = checkpoint["extra_state"]
    first_update = int(checkpoint["optimizer_history"][-1]["num_updates"])
    state[TASK_STATE] = {**state.get(TASK_STATE, {}), TRAIN_TOKENS: 0, FIRST_UPDATE: first_update}
    for name in ("best", "val_loss"):
        state.pop(name, None)
    if with_new_data:
        state["train_iterator"] = {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True}
        state["previous_training_time"] = 0
