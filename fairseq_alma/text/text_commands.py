"""The command lines that grow, train, join and test language models in one stage."""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import fairseq_alma
from fairseq_alma.data.stream import holdout_name, slice_name
from fairseq_alma.learners.plan import Growth, ModelId, StagePlan, Training
from fairseq_alma.runs.predictor import BRANCH, ENSEMBLE_FILE, predicting_checkpoint
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.text.process import Command
from fairseq_alma.text.train_options import Option, TrainOptions, replace_option
from fairseq_alma.training.anytime_options import PAPERS_WAY, AnytimeOptions
from fairseq_alma.watch.curve_options import CURVE_OPTIONS, TENSORBOARD, CurveOptions

NEVER = 1_000_000_000
NUM_LOG_LINES = 100
MAX_LOG_INTERVAL = 25
TEST_SPLITS = ("valid", "test")
GROWN_FILE = "grown.pt"
WHOLE, UP_TO_BRANCH = "whole", "up to branch"
"""Parts of a training; the third is `BRANCH`, which is also the folder of what branches off."""
GROWTH_RECORD = "growth.json"
"""What was measured right after growth: when the weights before growth are gone, it cannot be measured again."""

Groups = list[tuple[str, ...]]


@dataclass(frozen=True)
class TextCommands:
    """Builds command lines; runs nothing.

    Attributes:
        stream: folder of the stream.
        folder: the run.
        options: what the user gave after ``--``.
        wait: mega-batches gathered for a stage; the last stage takes what is left.
        replay: train on all mega-batches so far.
        save_every: updates between two checkpoints within a stage.
        validate: let fairseq-train validate when it saves.
        keep_checkpoints: keep each of these checkpoints.
        num_procs: processes that train a model together; they share the batches of an update (``--update-freq``).
        nodes: of a SLURM allocation, that these processes are dealt to.
        anytime: what runs on from stage to stage, and what is tested.
        beginning: checkpoint whose weights a training has that starts from no model of the run; None: random ones.
        matrix: mega-batches of which a held-out and a training slice are tested after each stage; 0: none.
    """

    stream: Path
    folder: RunFolder
    options: TrainOptions
    wait: int
    replay: bool
    save_every: int
    validate: bool
    keep_checkpoints: bool
    num_procs: int = 1
    nodes: int = 1
    anytime: AnytimeOptions = PAPERS_WAY
    beginning: Optional[Path] = None
    matrix: int = 0

    def all_of(self, plan: StagePlan) -> list[Command]:
        """Return the commands of a stage in order."""
        commands = []
        for training in plan.trainings:
            commands += [self.grow(training)] if training.growth else []
            commands += self.trainings(plan, training)
            commands += [self.average(training.model)] if self.anytime.predicts_with == "average" else []
        for training in plan.trainings:
            if training.growth:
                before = self.test_ungrown(training)
                commands += [self.test_grown(training), *([before] if before is not None else [])]
        commands += [self.join(plan)] if plan.combine != "single" else []
        return commands + [self.test(plan, split) for split in (*TEST_SPLITS, *self.matrix_splits())]

    @property
    def live(self) -> CurveOptions:
        """The curves that the user wants to watch."""
        return self.options.live

    def grow(self, training: Training) -> Command:
        """Return the command that adds experts to the weights that a training starts from."""
        start, growth = training.start, training.growth
        assert start is not None and growth is not None, training
        groups: Groups = [
            ("--path", str(self.begins_from(start)), "--out", str(self.grown(training.model))),
            ("--method", growth.method, "--experts", str(growth.num_new), "--seed", str(growth.seed)),
        ]
        if self.anytime.carry_optimizer:
            groups.append(("--optimizer", "share" if growth.method == "split" else "copy"))
        if growth.method != "scratch":
            groups.append(("--select", growth.select, *self._measuring(growth)))
        if growth.noise:
            groups.append(("--noise", repr(growth.noise)))
        return Command("alma-grow", tuple(groups))

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of each training, in order."""
        return (UP_TO_BRANCH, BRANCH, WHOLE) if self.anytime.copies_branch else (WHOLE,)

    def trainings(self, plan: StagePlan, training: Training) -> list[Command]:
        """Return the commands that train one model in a stage, in order: its own, and those around a branch."""
        return [self.train(plan, training, part) for part in self.parts]

    def train(self, plan: StagePlan, training: Training, part: str = WHOLE) -> Command:
        """Return the command that trains one model; given again after a kill, it resumes.

        Args:
            plan: of the stage.
            training: of the model.
            part: ``WHOLE``: to its end; ``UP_TO_BRANCH``: to where a copy branches off; ``BRANCH``: that copy.
        """
        stage = plan.stage
        data = ["--megabatch", str(stage.last_arrival), "--wait", str(self.wait)]
        model = ["--seed", str(training.seed), "--save-dir", str(self.save_folder(training.model, part))]
        groups: Groups = [
            *self._engine(),
            (*data, "--replay") if self.replay else tuple(data),
            tuple(model),
        ]
        if self.num_procs > 1:
            groups.append(("--distributed-world-size", str(self.num_procs)))
        groups += [*self._start(training, part), *self._anytime(training, part)]
        groups += [*self._saving(), *self._reporting()]
        groups += [self._own_curves(training.model, option) for option in self._model(training, part)]
        environment = self.live.wandb_environment(self.folder, training.model)
        return Command("fairseq-train", tuple(groups), environment, self.num_procs, self.nodes)

    def average(self, model: ModelId) -> Command:
        """Return the command that makes a checkpoint of the averaged weights of a trained model."""
        words = (str(self.folder.checkpoint(model)), "--average", "--out", str(self.predicting(model)), "--force")
        return Command("alma-ensemble", (words,))

    def join(self, plan: StagePlan) -> Command:
        """Return the command that makes one checkpoint of all that predicts after the stage."""
        members = tuple(str(self.predicting(model)) for model in plan.predictors)
        return Command("alma-ensemble", (members, ("--out", str(self.predictor(plan)), "--force")))

    def matrix_splits(self) -> list[str]:
        """Return what else is tested after each stage: held-out and training slices of all mega-batches."""
        return [name(t) for name in (holdout_name, slice_name) for t in range(self.matrix)]

    def test(self, plan: StagePlan, split: str) -> Command:
        """Return the command that tests what predicts after the stage on a split, such as ``valid``."""
        return self._evaluate(self.predictor(plan), split)

    def test_grown(self, training: Training) -> Command:
        """Return the command that tests a model right after growth, before its training, on ``valid``."""
        return self._evaluate(self.grown(training.model), "valid")

    def test_ungrown(self, training: Training) -> Optional[Command]:
        """Return the command that tests the weights that grow as they were before; None: the stage before has."""
        assert training.start is not None, training
        path = self.begins_from(training.start)
        return None if path == self.predicting(training.start) else self._evaluate(path, "valid")

    def grown(self, model: ModelId) -> Path:
        """Return the checkpoint of a model that has grown and is not trained yet."""
        return self.folder.stage_folder(model.stage) / GROWN_FILE

    def predictor(self, plan: StagePlan) -> Path:
        """Return the one checkpoint that stands for everything that predicts after the stage."""
        if plan.combine == "single":
            (model,) = plan.predictors
            return self.predicting(model)
        if plan.combine == "probabilities":
            return self.folder.stage_folder(plan.stage.index) / ENSEMBLE_FILE
        raise NotImplementedError(f"combining by {plan.combine}")

    def predicting(self, model: ModelId) -> Path:
        """Return the checkpoint by which a trained model predicts."""
        return predicting_checkpoint(self.folder, model, self.anytime.predicts_with)

    def begins_from(self, model: ModelId) -> Path:
        """Return the checkpoint of a trained model that a later stage starts from; a best one has its own optimizer."""
        is_best = self.anytime.best_checkpoint and not self.anytime.carry_optimizer
        return self.predicting(model) if is_best else self.folder.checkpoint(model)

    def save_folder(self, model: ModelId, part: str) -> Path:
        """Return the save directory of a part of a training."""
        return self.branch_folder(model) if part == BRANCH else self.folder.model_folder(model)

    def branch_folder(self, model: ModelId) -> Path:
        """Return the save directory of the copy of a model whose learning rate decays."""
        return self.folder.model_folder(model) / BRANCH

    def branch(self, model: ModelId) -> Path:
        """Return that copy's checkpoint."""
        return predicting_checkpoint(self.folder, model, "branch")

    def first_update(self, training: Training, part: str = WHOLE) -> int:
        """Return how many updates the optimizer has made when a part of a training begins."""
        is_carried = self.anytime.carry_optimizer and training.start is not None
        before = training.model.stage * (self.options.max_update or 0) if is_carried else 0
        return before + ((self.num_updates(UP_TO_BRANCH) or 0) if part == BRANCH else 0)

    def num_updates(self, part: str) -> Optional[int]:
        """Return the updates that a part of a training has counted when it ends, a branch its own alone.

        None: epochs end it.
        """
        whole = self.options.max_update
        if whole is None or part == WHOLE:
            return whole
        branch = self.anytime.branch_updates(whole)
        return branch if part == BRANCH else whole - branch

    def peak(self, stage: int) -> float:
        """Return the learning rate that a stage warms up to."""
        (lr,) = self.options.last("--lr") or ("0",)
        (warmup,) = self.options.last("--warmup-updates") or ("0",)
        (power,) = self.options.last("--power") or ("1",)
        assert self.options.max_update is not None
        return float(lr) * self.anytime.peak(stage, self.options.max_update, int(warmup), float(power))

    def _start(self, training: Training, part: str) -> Groups:
        """Return the options that name what a training begins with."""
        if part == BRANCH:
            return [("--continue-once", str(self.folder.checkpoint(training.model)), "--continue-as", "branch")]
        if training.start is None:
            return [] if self.beginning is None else [("--finetune-from-model", str(self.beginning))]
        path = self.grown(training.model) if training.growth else self.begins_from(training.start)
        if self.anytime.carry_optimizer:
            return [("--continue-once", str(path), "--continue-as", "stage")]
        return [("--finetune-from-model", str(path))]

    def _anytime(self, training: Training, part: str) -> Groups:
        """Return the options of the average, and of a decay within the training at hand."""
        groups: Groups = []
        if self.anytime.replay_share is not None:
            order = ("--replay-order", self.anytime.replay_order) if self.anytime.replay_order is not None else ()
            groups.append(("--replay-share", f"{self.anytime.replay_share:g}", *order))
        if self.anytime.best_checkpoint:
            groups.append(("--best-checkpoint-metric", "nll_loss"))
        if self.anytime.ema_half_life is not None:
            groups.append(("--ema-half-life", self.anytime.ema_half_life))
        if self.anytime.branch_decay is not None and (part == BRANCH or not self.anytime.copies_branch):
            assert self.options.max_update is not None  # `check_schedule` has seen to it
            first, end = self.first_update(training, BRANCH), self.first_update(training) + self.options.max_update
            window = ("--branch-from", str(first), "--branch-until", str(end))
            groups.append((*window, "--branch-shape", self.anytime.shape))
        return groups

    def _evaluate(self, path: Path, split: str) -> Command:
        groups: Groups = [
            *self._engine(),
            ("--path", str(path), "--gen-subset", split),
            ("--log-format", "simple"),
        ]
        evaluation = self.options.for_evaluation()
        return Command("fairseq-eval-lm", (*groups, *((name, *values) for name, values in evaluation)))

    def _own_curves(self, model: ModelId, option: Option) -> tuple[str, ...]:
        """Return an option as one group; the curves of each model go into a folder of their own."""
        name, values = option
        return (name, str(self.live.curves(self.folder, model))) if name == TENSORBOARD else (name, *values)

    def _model(self, training: Training, part: str) -> list[Option]:
        """Return the user's options, with those of the model as the training wants it."""
        options = self.options.options
        num_updates = self.num_updates(part)
        if num_updates is not None and (self.anytime.carry_optimizer or part != WHOLE):
            end = self.first_update(training, part) + num_updates
            options = replace_option(options, "--max-update", str(end))
        if self.anytime.rewarm == "one-schedule" and training.start is not None:
            options = replace_option(options, "--lr", f"{self.peak(training.model.stage):.6g}")
        if part == BRANCH:  # it would be drawn over what it branches off from
            options = [option for option in options if option[0] not in CURVE_OPTIONS]
        if training.num_joint > 1:
            options = self.options.joint(training.num_joint, options)
        if training.num_experts is not None:
            options = [*options, ("--num-experts", (str(training.num_experts),))]
        return options

    def _measuring(self, growth: Growth) -> tuple[str, ...]:
        """Return the options of alma-grow's pass over held-out text; a random choice needs none."""
        if growth.select == "random":
            return ()
        cpu = ("--cpu",) if self.options.last("--cpu") is not None else ()
        batch = [values for name, values in self.options.for_evaluation() if name == "--batch-size"]
        return ("--stream", str(self.stream), *cpu, *(("--batch-size", *batch[0]) if batch else ()))

    def _engine(self) -> Groups:
        plugin = Path(fairseq_alma.__file__).parent
        return [(str(self.stream),), ("--user-dir", str(plugin), "--task", "alma_lm")]

    def _saving(self) -> Groups:
        # At the end of an epoch fairseq saves every --save-interval epochs: only the last one must be.
        every = [
            ("--no-epoch-checkpoints", "--save-interval", str(self.options.max_epoch or NEVER)),
            ("--save-interval-updates", str(self.save_every)),
        ]
        return every if self.keep_checkpoints else [*every, ("--keep-interval-updates", "1")]

    def _reporting(self) -> Groups:
        interval = MAX_LOG_INTERVAL
        if self.options.max_update is not None:
            interval = min(MAX_LOG_INTERVAL, max(1, self.options.max_update // NUM_LOG_LINES))
        log: Groups = [("--log-format", "json", "--log-interval", str(interval))]
        is_validated = self.validate or self.anytime.best_checkpoint
        return log if is_validated else [*log, ("--disable-validation",)]
