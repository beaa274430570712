"""The stock command lines that train and test a language model in one stage."""

from dataclasses import dataclass
from pathlib import Path

import fairseq_alma
from fairseq_alma.learners.checkpoints import LAST
from fairseq_alma.learners.plan import Model, StagePlan, Training
from fairseq_alma.learners.process import Command
from fairseq_alma.learners.run_folder import RunFolder
from fairseq_alma.learners.train_options import TrainOptions

NEVER = 1_000_000_000
NUM_LOG_LINES = 100
MAX_LOG_INTERVAL = 100
TEST_SPLITS = ("valid", "test")

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
    """

    stream: Path
    folder: RunFolder
    options: TrainOptions
    wait: int
    replay: bool
    save_every: int
    validate: bool
    keep_checkpoints: bool

    def all_of(self, plan: StagePlan) -> list[Command]:
        """Return the commands of a stage in order."""
        commands = [self.train(plan, training) for training in plan.trainings]
        return commands + [self.test(plan, split) for split in TEST_SPLITS]

    def train(self, plan: StagePlan, training: Training) -> Command:
        """Return the command that trains one model; given again after a kill, it goes on."""
        stage = plan.stage
        data = ["--megabatch", str(stage.last_arrival), "--wait", str(self.wait)]
        model = ["--seed", str(training.seed), "--save-dir", str(self.folder.model_folder(training.model))]
        groups: Groups = [
            *self._engine(),
            (*data, "--replay") if self.replay else tuple(data),
            tuple(model),
        ]
        if training.start is not None:
            groups.append(("--finetune-from-model", str(self.checkpoint(training.start))))
        groups += [*self._saving(), *self._reporting()]
        return Command("fairseq-train", (*groups, *((name, *values) for name, values in self.options.options)))

    def test(self, plan: StagePlan, split: str) -> Command:
        """Return the command that tests what predicts after the stage on ``valid`` or ``test``."""
        groups: Groups = [
            *self._engine(),
            ("--path", str(self.predictor(plan)), "--gen-subset", split),
            ("--log-format", "simple"),
        ]
        evaluation = self.options.for_evaluation()
        return Command("fairseq-eval-lm", (*groups, *((name, *values) for name, values in evaluation)))

    def checkpoint(self, model: Model) -> Path:
        """Return the checkpoint that holds a model once it is trained."""
        return self.folder.model_folder(model) / LAST

    def predictor(self, plan: StagePlan) -> Path:
        """Return the one checkpoint that stands for everything that predicts after the stage."""
        if plan.combine != "single":
            raise NotImplementedError(f"combining by {plan.combine}")
        (model,) = plan.predictors
        return self.checkpoint(model)

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
