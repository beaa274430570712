"""A training that carries on another one with all its state, and counts its own updates and tokens from zero.

fairseq begins with a checkpoint's weights alone, or resumes, of which ``--continue-once`` is a form: weights,
optimizer, number of updates, schedule, and position in the data. A stage that carries the optimizer takes all but the
position; a branch takes the position too. Later launches resume from the training's own last checkpoint, to which none
of this applies.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Mapping, Optional, Sequence

from fairseq_alma.checkpoints import FIRST_UPDATE, TASK_STATE, TRAIN_TOKENS
from fairseq_alma.checkpoints.model_options import WEIGHTS_FLAG
from fairseq_alma.errors import AlmaError
from fairseq_alma.options import PLAN, TRAINING, opt
from fairseq_alma.training.feature import Feature, Setting
from fairseq_alma.training.planned_run import ENDLESS, PlannedRun

RESUME, STAGE, BRANCH = "resume", "stage", "branch"
GROWABLE = ("adam", "fused_adam", "muon")
"""Optimizers whose state grows with a model."""
BATCHES = "batches"
"""Key of the task's state: a list of ``from_update``, batch_size, max_tokens, update_freq and num_procs."""


@dataclass
class TokenCount(Feature):
    """Counts the tokens that a stage was trained on, and notes from which update on its batches have which size.

    fairseq's own meters begin anew when a training is resumed at the start of an epoch.
    """

    is_on: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.num_tokens: Any = 0
        self.first_update = 0
        self.batches: list[dict[str, Any]] = []
        self._current: dict[str, Any] = {}

    def prepare(self, setting: Setting) -> None:
        self._current = dict(setting.batches or {})

    def before_step(self, optimizer: Any, update: int) -> None:
        if self._current and (not self.batches or self.batches[-1] | self._current != self.batches[-1]):
            self.batches.append({"from_update": update, **self._current})

    def count(self, logs: Sequence[Mapping[str, Any]]) -> None:
        # A sum over processes is a tensor and stays one: reading its value after each update would stall a GPU.
        self.num_tokens = self.num_tokens + sum(log["ntokens"] for log in logs)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {TRAIN_TOKENS: int(self.num_tokens)}
        state |= {FIRST_UPDATE: self.first_update} if self.first_update else {}
        return state | ({BATCHES: self.batches} if self.batches else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_tokens, self.first_update = state[TRAIN_TOKENS], state.get(FIRST_UPDATE, 0)
        self.batches = [*state.get(BATCHES, ())]


@dataclass
class CarriedOptimizer(Feature):
    """Begins a stage, or a branch, with the optimizer, number of updates and schedule of the checkpoint before."""

    owned: ClassVar[Mapping[str, str]] = {"--continue-as": "give --carry-optimizer before the --"}

    carry_optimizer: Optional[bool] = opt(
        None,
        "carry optimizer, number of updates and learning-rate schedule from stage to stage",
        kinds=("text",),
        side=PLAN,
    )
    continue_as: Optional[str] = opt(
        None,
        "meaning of --continue-once: resume (fairseq's), or carry its training on with new data (stage) or the next "
        "data (branch)",
        choices=(RESUME, STAGE, BRANCH),
        side=TRAINING,
        defaults={TRAINING: RESUME},
    )

    def check(self, run: PlannedRun) -> None:
        """Refuse a run with nothing to carry on, a schedule that ends before it, a state that cannot grow."""
        trainings = [each for plan in run.plans[1:] for each in plan.trainings]
        if len(run.plans) > 1 and not any(each.start for each in trainings):  # to one stage others may be appended
            raise ValueError("--carry-optimizer: each stage begins with new weights and a new optimizer; omit it")
        run.require_updates("--carry-optimizer")
        _require_full_stream(run)
        optimizer = " ".join(run.last("--optimizer") or ())
        if optimizer not in GROWABLE and any(each.growth for each in trainings):
            raise ValueError(
                f"--carry-optimizer: the state of --optimizer {optimizer or '(none given)'} cannot grow with a model; "
                f"give {' or '.join(GROWABLE)} after the --"
            )

    def prepare(self, setting: Setting) -> None:
        if setting.start is None:
            raise AlmaError(f"--continue-as {self.continue_as}: give the checkpoint to begin with as --continue-once")

    def begin(self, checkpoint: dict[str, Any], setting: Setting) -> None:
        """Make the checkpoint the beginning of a training that has made no update of its own."""
        found = checkpoint["optimizer_history"][-1]["optimizer_name"]
        if setting.optimizer not in (None, found):
            raise AlmaError(
                f"{setting.start}: trained with {found}, the command trains with {setting.optimizer}, which cannot "
                f"carry its state on; give the same --optimizer, or the checkpoint as {WEIGHTS_FLAG}"
            )
        if checkpoint.get("last_optimizer_state") is None:
            raise AlmaError(
                f"{setting.start}: has no optimizer state, so a training cannot carry it on; give it as {WEIGHTS_FLAG}"
            )
        state: dict[str, Any] = checkpoint["extra_state"]
        first_update = int(checkpoint["optimizer_history"][-1]["num_updates"])
        state[TASK_STATE] = {**state.get(TASK_STATE, {}), TRAIN_TOKENS: 0, FIRST_UPDATE: first_update, BATCHES: []}
        for name in ("best", "val_loss"):
            state.pop(name, None)
        if self.continue_as == STAGE:
            state["train_iterator"] = {"version": 3, "epoch": 1, "iterations_in_epoch": 0}
            state["previous_training_time"] = 0


def _require_full_stream(run: PlannedRun) -> None:
    """Refuse schedules that end before the stream does."""
    if run.schedule in ENDLESS:
        run.refuse_rates_by_epoch("--carry-optimizer")
        return
    if run.schedule != "polynomial_decay":
        raise ValueError(
            f"--carry-optimizer: --lr-scheduler {run.schedule} does not span several stages; give "
            f"{' or '.join(ENDLESS)}, or polynomial_decay with a --total-num-update for all of them"
        )
    total, needed = run.number("--total-num-update"), len(run.plans) * (run.max_update or 0)
    if total is None or total < needed:
        raise ValueError(
            f"--carry-optimizer: --total-num-update {'' if total is None else f'{total:g} '}after the --, and the "
            f"{len(run.plans)} stages make {needed:,} updates in all; give at least that, or --lr-scheduler fixed"
        )
