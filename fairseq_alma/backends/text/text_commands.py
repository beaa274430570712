"""The command lines that grow, train, join and test language models in one stage."""

from dataclasses import dataclass
from pathlib import Path

import fairseq_alma
from fairseq_alma.backends.text.process import Command
from fairseq_alma.backends.text.train_options import Option, TrainOptions
from fairseq_alma.learners.plan import Growth, ModelId, StagePlan, Training
from fairseq_alma.runs.curve_options import TENSORBOARD, CurveOptions
from fairseq_alma.runs.run_folder import RunFolder

NEVER = 1_000_000_000
NUM_LOG_LINES = 100
MAX_LOG_INTERVAL = 25
TEST_SPLITS = ("valid", "test")
GROWN_FILE = "grown.pt"
ENSEMBLE_FILE = "ensemble.pt"
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

    def all_of(self, plan: StagePlan) -> list[Command]:
        """Return the commands of a stage in order."""
        commands = []
        for training in plan.trainings:
            commands += [self.grow(training)] if training.growth else []
            commands += [self.train(plan, training)]
        commands += [self.test_grown(training) for training in plan.trainings if training.growth]
        commands += [self.join(plan)] if plan.combine != "single" else []
        return commands + [self.test(plan, split) for split in TEST_SPLITS]

    @property
    def live(self) -> CurveOptions:
        """The curves that the user wants to watch."""
        return self.options.live

    def grow(self, training: Training) -> Command:
        """Return the command that adds experts to the weights that a training starts from."""
        start, growth = training.start, training.growth
        assert start is not None and growth is not None, training
        groups: Groups = [
            ("--path", str(self.folder.checkpoint(start)), "--out", str(self.grown(training.model))),
            ("--method", growth.method, "--experts", str(growth.num_new), "--seed", str(growth.seed)),
        ]
        if growth.method != "scratch":
            groups.append(("--select", growth.select, *self._measuring(growth)))
        return Command("alma-grow", tuple(groups))

    def train(self, plan: StagePlan, training: Training) -> Command:
        """Return the command that trains one model; given again after a kill, it resumes."""
        stage = plan.stage
        data = ["--megabatch", str(stage.last_arrival), "--wait", str(self.wait)]
        model = ["--seed", str(training.seed), "--save-dir", str(self.folder.model_folder(training.model))]
        groups: Groups = [
            *self._engine(),
            (*data, "--replay") if self.replay else tuple(data),
            tuple(model),
        ]
        if self.num_procs > 1:
            groups.append(("--distributed-world-size", str(self.num_procs)))
        if training.start is not None:
            path = self.grown(training.model) if training.growth else self.folder.checkpoint(training.start)
            groups.append(("--finetune-from-model", str(path)))
        groups += [*self._saving(), *self._reporting()]
        groups += [self._own_curves(training.model, option) for option in self._model(training)]
        environment = self.live.wandb_environment(self.folder, training.model)
        return Command("fairseq-train", tuple(groups), environment, self.num_procs, self.nodes)

    def join(self, plan: StagePlan) -> Command:
        """Return the command that makes one checkpoint of all that predicts after the stage."""
        members = tuple(str(self.folder.checkpoint(model)) for model in plan.predictors)
        return Command("alma-ensemble", (members, ("--out", str(self.predictor(plan)), "--force")))

    def test(self, plan: StagePlan, split: str) -> Command:
        """Return the command that tests what predicts after the stage on ``valid`` or ``test``."""
        return self._evaluate(self.predictor(plan), split)

    def test_grown(self, training: Training) -> Command:
        """Return the command that tests a model right after growth, before its training, on ``valid``."""
        return self._evaluate(self.grown(training.model), "valid")

    def grown(self, model: ModelId) -> Path:
        """Return the checkpoint of a model that has grown and is not trained yet."""
        return self.folder.stage_folder(model.stage) / GROWN_FILE

    def predictor(self, plan: StagePlan) -> Path:
        """Return the one checkpoint that stands for everything that predicts after the stage."""
        if plan.combine == "single":
            (model,) = plan.predictors
            return self.folder.checkpoint(model)
        if plan.combine == "probabilities":
            return self.folder.stage_folder(plan.stage.index) / ENSEMBLE_FILE
        raise NotImplementedError(f"combining by {plan.combine}")

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

    def _model(self, training: Training) -> list[Option]:
        """Return the user's options, with those of the model as the training wants it."""
        options = self.options.options
        if training.num_joint > 1:
            options = self.options.joint(training.num_joint)
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
        return log if self.validate else [*log, ("--disable-validation",)]
