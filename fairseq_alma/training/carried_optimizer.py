"""Carry the optimizer from stage to stage, and count the updates and tokens of each stage.

fairseq loads either the weights of a checkpoint or the complete training state. ``--continue-once`` loads the training
state of another training: weights, optimizer, number of updates, schedule, and position in the data. A stage with a
carried optimizer resets the position. A branch (copy of the model, trained with a decaying learning rate) does not
reset the position. If the same command runs again, fairseq-train resumes from the last checkpoint of the stage.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Mapping, Optional, Sequence

from fairseq_alma.checkpoints import FIRST_UPDATE, TASK_STATE, TRAIN_TOKENS
from fairseq_alma.checkpoints.model_options import WEIGHTS_FLAG
from fairseq_alma.errors import AlmaError
from fairseq_alma.options import PLAN, TRAINING, opt
from fairseq_alma.training.feature import Feature, PlannedRun, Setting

RESUME, STAGE, BRANCH = "resume", "stage", "branch"
GROWABLE = ("adam", "fused_adam", "muon")
"""Names of the optimizers whose state can grow with a model."""
BATCHES = "batches"
"""Key of the state of training features for a list of batch sizes: dictionaries with from_update, batch_size,
max_tokens, update_freq and num_procs."""


@dataclass
class TokenCount(Feature):
    """Feature that counts the training tokens of a stage, and records changes of the batch size.

    fairseq resets its own token count when a training resumes at the start of an epoch.
    """

    is_on: ClassVar[bool] = True

    num_tokens: Any = field(default=0, init=False)
    first_update: int = field(default=0, init=False)
    batches: list[dict[str, Any]] = field(default_factory=list, init=False)
    _current: dict[str, Any] = field(default_factory=dict, init=False)

    def prepare(self, setting: Setting) -> None:
        self._current = dict(setting.batches or {})

    def before_step(self, optimizer: Any, update: int) -> None:
        if self._current and (not self.batches or self.batches[-1] | self._current != self.batches[-1]):
            self.batches.append({"from_update": update, **self._current})

    def count(self, logs: Sequence[Mapping[str, Any]]) -> None:
        # Keep the sum over processes as a tensor, because reading the value after each update would stall the GPU.
        self.num_tokens = self.num_tokens + sum(log["ntokens"] for log in logs)

    def state_dict(self) -> dict[str, Any]:
        given = {FIRST_UPDATE: self.first_update, BATCHES: self.batches}
        return {TRAIN_TOKENS: int(self.num_tokens), **{name: value for name, value in given.items() if value}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_tokens, self.first_update = state[TRAIN_TOKENS], state.get(FIRST_UPDATE, 0)
        self.batches = [*state.get(BATCHES, ())]


@dataclass
class CarriedOptimizer(Feature):
    """Feature that starts a stage or a branch with the optimizer, number of updates and schedule of a checkpoint."""

    owned: ClassVar[Mapping[str, str]] = {"--continue-as": "give --carry-optimizer before the --"}

    carry_optimizer: Optional[bool] = opt(
        None,
        "carry optimizer, number of updates and learning-rate schedule over to the next stage",
        kinds=("text",),
        side=PLAN,
    )
    continue_as: Optional[str] = opt(
        None,
        "with --continue-once: resume the training, start a stage on new data, or start a branch (see --branch-share)",
        choices=(RESUME, STAGE, BRANCH),
        side=TRAINING,
        defaults={TRAINING: RESUME},
    )

    def check(self, run: PlannedRun) -> None:
        trainings = [each for plan in run.plans[1:] for each in plan.trainings]
        if len(run.plans) > 1 and not any(each.start for each in trainings):  # one stage: more stages may follow later
            raise ValueError(
                "--carry-optimizer: the learner starts each stage with new weights and a new optimizer; omit the option"
            )
        run.require_updates("--carry-optimizer")
        if run.value("--lr-scheduler") == "polynomial_decay":
            total, needed = run.value("--total-num-update"), len(run.plans) * int(run.value("--max-update"))
            if not total or float(total) < needed:
                raise ValueError(
                    f"--carry-optimizer: expected --total-num-update of at least {needed} for "
                    f"{len(run.plans)} stages, found {total or 'none'}; give this number, or --lr-scheduler fixed"
                )
        else:
            also = ", or polynomial_decay with a --total-num-update for all stages"
            run.require_endless("--carry-optimizer", also)
        optimizer = run.value("--optimizer")
        if optimizer not in GROWABLE and any(each.growth for each in trainings):
            raise ValueError(
                f"--carry-optimizer: a model that grows requires --optimizer {' or '.join(GROWABLE)} after --, found "
                f"{optimizer or 'none'}; give one of these optimizers"
            )

    def prepare(self, setting: Setting) -> None:
        if setting.start is None:
            raise AlmaError(f"--continue-as {self.continue_as}: needs a starting checkpoint; give --continue-once")

    def begin(self, checkpoint: dict[str, Any], setting: Setting) -> None:
        """Reset the token count and the best loss in the checkpoint; for a new stage, also reset the data position.

        Raises:
            AlmaError: the checkpoint has no optimizer state, or the state of an optimizer other than ``--optimizer``.
        """
        found = checkpoint["optimizer_history"][-1]["optimizer_name"]
        if setting.optimizer not in (None, found):
            raise AlmaError(
                f"{setting.start}: expected optimizer {setting.optimizer}, found {found}; give the --optimizer of the "
                f"checkpoint, or {WEIGHTS_FLAG} instead of --continue-once"
            )
        if checkpoint.get("last_optimizer_state") is None:
            raise AlmaError(f"{setting.start}: has no optimizer state; give {WEIGHTS_FLAG} instead of --continue-once")
        state: dict[str, Any] = checkpoint["extra_state"]
        first_update = int(checkpoint["optimizer_history"][-1]["num_updates"])
        state[TASK_STATE] = {**state.get(TASK_STATE, {}), TRAIN_TOKENS: 0, FIRST_UPDATE: first_update, BATCHES: []}
        for name in ("best", "val_loss"):
            state.pop(name, None)
        if self.continue_as == STAGE:
            state["train_iterator"] = {"version": 3, "epoch": 1, "iterations_in_epoch": 0}
            state["previous_training_time"] = 0
