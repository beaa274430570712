"""Back end of ``alma-stream`` for text: steps and lengths of stages, and checkpoint files of a run."""

from copy import copy
from functools import partial
from pathlib import Path
from typing import Iterable, Optional, Sequence

import fairseq_alma
from fairseq_alma.data.stream import Stream, split_name
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import FileIdentity, file_identity
from fairseq_alma.learners.learner import ModelId, Stage, StagePlan, Training
from fairseq_alma.options import given_values
from fairseq_alma.runs.evaluation import evaluation_command
from fairseq_alma.runs.loop import describe_stage
from fairseq_alma.runs.run_folder import BRANCH, ENSEMBLE_FILE, PREDICTIONS_FILE, RunFolder, predicting_checkpoint
from fairseq_alma.runs.study import RunRequest
from fairseq_alma.text import stage_checkpoints
from fairseq_alma.text.helper import call
from fairseq_alma.text.text_steps import (
    COMPLETE,
    UP_TO_BRANCH,
    Average,
    Before,
    Grow,
    Join,
    Test,
    TextStep,
    Train,
)
from fairseq_alma.text.train_options import Recipe, TrainOptions
from fairseq_alma.training.feature import Part
from fairseq_alma.training.features import BestCheckpoint, CarriedOptimizer, LRBranch

GROWN_FILE = "grown.pt"


def check_start(path: Path, stream: Path, sizes: Sequence[tuple[str, str]]) -> None:
    """Raise AlmaError if the initial checkpoint does not fit the stream or the ``sizes`` that the learner sets."""
    from fairseq_alma.checkpoints.checkpoint_file import check_dictionary, read_checkpoint

    checkpoint = read_checkpoint(path)
    check_dictionary(checkpoint, str(path), Stream.open(stream, "text"))
    for name, size in sizes:
        found = str(checkpoint["cfg"]["model"].get(name[2:].replace("-", "_"), size))
        if found != size:
            raise AlmaError(
                f"{path}: expected {name} {size}, the first size of --grow-schedule, found {found}; change one of them"
            )


class TextJob:
    """Back end of ``alma-stream`` for text; see `loop.Backend`.

    Args:
        request: options before ``--``.
        stream: stream with the data; None: a dry run without a stream.
        recipe: options after ``--``, including the defaults.

    Attributes:
        folder: folder of the run.
        engine: first arguments of each fairseq command.
        branch: training feature of the branch (copy of the model, trained with a decaying learning rate).
        carries_optimizer: whether each later stage starts with the optimizer state of the previous stage.
        keeps_best: whether fairseq-train keeps the checkpoint with the lowest loss on ``valid``.
        stripped: path of a model's last checkpoint -> `FileIdentity` of this and the tested checkpoint after `strip`.
        train_options: function that returns the options after ``--`` for run.json.
        options: options after ``--``, adapted to the number of processes and ``--iid``.
        last: function that returns the values of an option after ``--``; see `TrainOptions.last`.
        learner: learner of the first seed.
        lengths: number of updates of each stage; None: an option after ``--`` sets the length, or there is no stream.

    Raises:
        ValueError: an option after ``--`` is invalid.
    """

    unit = "token"
    overridden: tuple[str, ...] = ()

    def __init__(self, request: RunRequest, stream: Optional[Stream], recipe: Recipe) -> None:
        self.request, self.stream, self.features, self.recipe = request, stream, request.features, recipe
        self.folder = request.folder(request.seeds[0])
        plugin = str(Path(fairseq_alma.__file__).parent)
        self.engine = [(str(request.stream),), ("--user-dir", plugin, "--task", "alma_lm")]
        self.branch = self.features[LRBranch]
        self.carries_optimizer = bool(self.features[CarriedOptimizer].carry_optimizer)
        self.keeps_best = bool(self.features[BestCheckpoint].best_checkpoint)
        self.stripped: dict[Path, tuple[Optional[FileIdentity], ...]] = {}
        self.learner = request.build_learner("text", request.seeds[0])
        given = TrainOptions(recipe.words, self.learner.owned)
        self.train_options = partial(given_values, recipe.words)
        self.options = given if request.num_procs == 1 else given.shared(request.num_procs)
        self.lengths = recipe.lengths
        if request.iid is not None and self.lengths is None:
            self.options = self.options.lengthened(request.iid)
        if self.branch.is_on and 1 in (self.lengths or [self.options.max_update or 0]):
            raise ValueError("--branch-share: a stage needs 2 updates, found 1; give more --passes or --max-update")
        self.last = self.options.last

    def holdouts(self, arrivals: Iterable[int]) -> list[str]:
        """Return the names of the non-empty held-out splits of the mega-batches with the numbers ``arrivals``."""
        if self.stream is None or not self.stream.has_holdouts:
            return []
        names = [split_name(t, "holdout") for t in arrivals]
        return [name for name in names if self.stream.split(name).num_tokens]

    def part(self, training: Training, part: str) -> Part:
        """Return (first update of the stage, number of updates, whether ``part`` is the learning-rate decay branch)."""
        return Part(self.first_update(training), self.stage_updates(training.model.stage), part == BRANCH)

    def check_start(self) -> None:
        assert self.stream is not None
        if (start := self.request.finetune_from_model) is not None:
            (first, *_) = self.learner.plan(Stage(0, (0,), (0,))).trainings
            call("fairseq_alma.text.text_job:check_start", start, self.stream.root, first.sizes)

    def print_plan(self, plans: Sequence[StagePlan], folder: RunFolder, name: str) -> None:
        """Print the commands of the requested stages, without running them; ``name``: see `RunDisplay`."""
        member, template = self.request.member, self.request.then_evaluate
        for plan in self.request.chosen(plans):
            steps = [
                step
                for step in self.steps(folder, plan)
                if member is None or any(model.member in member for model in step.trains)
            ]
            if steps:
                print(f"# {name}{describe_stage(plan, len(plans))}: --stage {plan.stage.index}")
            for step in steps:
                for command in step.commands():
                    print(command)
            if template is not None and member is None:
                print(evaluation_command(self.request, self.predictors(folder, plan), folder, plan))

    def of(self, folder: RunFolder) -> "TextJob":
        """Return a copy of the back end for the run in ``folder``."""
        own = copy(self)
        own.folder = folder
        return own

    def steps(self, folder: RunFolder, plan: StagePlan) -> list[TextStep]:
        job = self.of(folder)
        parts = (UP_TO_BRANCH, BRANCH, COMPLETE) if job.branch.is_on else (COMPLETE,)
        grow = [Grow(job, plan, training) for training in plan.trainings if training.growth]
        train: list[TextStep] = []
        for training in plan.trainings:
            train += [Train(job, plan, training, part) for part in parts]
            train += [Average(job, plan, training)] if job.features.predicts_with == "average" else []
        join = [Join(job, plan)] if len(plan.predictors) > 1 else []
        return [*grow, Before(job, plan), *train, *join, Test(job, plan)]

    def predictors(self, folder: RunFolder, plan: StagePlan) -> tuple[Path]:
        """Return a tuple of one path: the checkpoint to test after a stage, a single model or an ensemble."""
        if len(plan.predictors) == 1:
            return (self.of(folder).predicting(plan.predictors[0]),)
        assert plan.combine == "probabilities", plan.combine  # learners for text support no other combination
        return (folder.stage_folder(plan.stage.index) / ENSEMBLE_FILE,)

    def predicting(self, model: ModelId) -> Path:
        """Return the checkpoint of a trained model to use in tests and ensembles."""
        return predicting_checkpoint(self.folder, model, self.features.predicts_with)

    def starting_checkpoint(self, model: ModelId) -> Path:
        """Return the checkpoint with which a later stage starts: the best or the last checkpoint of ``model``."""
        is_best = self.keeps_best and not self.carries_optimizer
        return self.predicting(model) if is_best else self.folder.checkpoint(model)

    def grown(self, model: ModelId) -> Path:
        """Return the checkpoint of a model after growth and before training."""
        return self.folder.stage_folder(model.stage) / GROWN_FILE

    def stage_updates(self, stage: int) -> Optional[int]:
        """Return the recorded or planned number of updates of a stage; None if only epochs limit the stage."""
        if self.lengths is None:
            return self.options.max_update
        record = self.folder.read_stage(stage)
        return self.lengths[stage] if record is None else record["num_updates"]

    def num_updates(self, training: Training, part: str) -> Optional[int]:
        """Return the number of updates of a part (`Train.part`) of a training run; None if only epochs limit it."""
        total = self.stage_updates(training.model.stage)
        if total is None or part == COMPLETE:
            return total
        branch = self.branch.num_updates(total, self.first_update(training))
        return branch if part == BRANCH else total - branch

    def first_update(self, training: Training, part: str = COMPLETE) -> int:
        """Return the number of optimizer updates before a part (`Train.part`) of a training run."""
        before, start = 0, training.start if self.carries_optimizer else None
        stages = [] if start is None else self.stages(training.model.stage)
        while start is not None:  # back to the stage that began with random weights
            before += self.stage_updates(start.stage) or 0
            start = next(each.start for each in self.learner.plan(stages[start.stage]).trainings if each.model == start)
        return before + ((self.num_updates(training, UP_TO_BRANCH) or 0) if part == BRANCH else 0)

    def stages(self, index: int) -> Sequence[Stage]:
        """Return the stages of the run; ``index``: number of a stage, for a dry run of unknown length."""
        num_megabatches = self.request.megabatches if self.stream is None else self.stream.num_megabatches
        return self.request.stages(num_megabatches or index + 1)

    def strip(self, model: ModelId) -> None:
        """Remove a trained model's intermediate checkpoints, and the optimizer states that no later stage needs."""
        last, predicting = self.folder.checkpoint(model), self.predicting(model)
        found = file_identity(last), file_identity(predicting)
        if self.stripped.get(last) == found:
            return
        finished = [] if self.carries_optimizer else [last]
        for path in [*finished, *([predicting] if self.keeps_best or self.branch.is_on else [])]:
            call("fairseq_alma.text.stage_checkpoints:drop_optimizer_state", path)
        stage_checkpoints.remove(last.parent, (last.name, predicting.name))
        if self.branch.is_on:
            stage_checkpoints.remove(predicting.parent, (last.name,))
        self.stripped[last] = file_identity(last), file_identity(predicting)

    def keep_only(
        self, folder: RunFolder, stages: Sequence[int], needed: Sequence[ModelId], gone: Sequence[ModelId]
    ) -> None:
        """Strip the models ``needed``; remove checkpoints of the models ``gone`` and temporary files of ``stages``."""
        for model in needed:
            if folder.model_folder(model).is_dir():
                self.of(folder).strip(model)
        for model in gone:  # after the fsync of the checkpoints to keep
            for own in (folder.model_folder(model) / BRANCH, folder.model_folder(model)):
                stage_checkpoints.remove(own)
        planned = self.stages(0)
        for index in stages:
            here = folder.stage_folder(index)
            # Each later stage writes its own ensemble and predictions. An ensemble stays only with all its members.
            names = [GROWN_FILE, *([] if index == stages[-1] else [PREDICTIONS_FILE])]
            names += [] if {*self.learner.plan(planned[index]).predictors} <= {*needed} else [ENSEMBLE_FILE]
            for name in names:
                (here / name).unlink(missing_ok=True)
