"""``alma-stream`` on streams of text: stock commands in processes of their own."""

from copy import copy
from pathlib import Path
from typing import Callable, Optional, Sequence

from fairseq_alma.data.stream import Stream
from fairseq_alma.files import FileIdentity, file_identity
from fairseq_alma.learners.learner import ModelId, StagePlan, Training
from fairseq_alma.runs.evaluation import StageEvaluation
from fairseq_alma.runs.loop import Run
from fairseq_alma.runs.run_folder import BRANCH, ENSEMBLE_FILE, PREDICTIONS_FILE, RunFolder, predicting_checkpoint
from fairseq_alma.runs.study import RunRequest
from fairseq_alma.terminal import shell_words
from fairseq_alma.text import stage_checkpoints
from fairseq_alma.text.defaults import Recipe, tokens_of
from fairseq_alma.text.text_steps import (
    UP_TO_BRANCH,
    WHOLE,
    Average,
    Count,
    Grow,
    Join,
    Test,
    TestGrowth,
    TextStep,
    Train,
)
from fairseq_alma.text.train_options import TrainOptions
from fairseq_alma.training.best_checkpoint import BestCheckpoint
from fairseq_alma.training.branch import LRBranch
from fairseq_alma.training.carried_optimizer import CarriedOptimizer
from fairseq_alma.training.feature import Part
from fairseq_alma.watch.run_display import describe_stage

GROWN_FILE = "grown.pt"


class TextJob:
    """What alma-stream does with text, see `study.Job`; the one run's back end, see `loop.Backend`.

    Args:
        request: what stands before ``--``.
        words: what stands after it.
        stream: the data; None: a dry run does without.
        recipe: what was filled in after ``--``; None: nothing.

    Attributes:
        folder: the run.
        options: what the user gave after ``--``, for one of several processes, and for as many updates as there are.
        words_per_token: of the stream, to show words per second.
        num_slices: mega-batches of which a held-out and a training slice are tested after each stage.
        lengths: updates of each stage, where --passes decides them; None: --max-update or --max-epoch does.
        stripped: by the last checkpoint of a model which files of it have their final form.

    Raises:
        ValueError: an option after ``--`` is wrong.
        AlmaError: nothing is held out of the mega-batches for --matrix.
    """

    unit = "word"
    overridden: tuple[str, ...] = ()

    def __init__(
        self, request: RunRequest, words: Sequence[str], stream: Optional[Stream], recipe: Optional[Recipe] = None
    ) -> None:
        self.request, self.stream, self.features, self.recipe = request, stream, request.features, recipe
        self.folder = request.folder(request.seeds[0])
        self.stripped: dict[Path, tuple[Optional[FileIdentity], ...]] = {}
        self.given = TrainOptions(words if recipe is None else recipe.words, request.learner.owned)
        self.lengths = None
        if recipe is not None and stream is not None:
            self.lengths = recipe.lengths([tokens_of(stream, each) for each in request.stages(stream.num_megabatches)])
        if request.learner.trains_jointly:
            self.given.joint(1)  # refuses what cannot be
        options = self.given if request.num_procs == 1 else self.given.shared(request.num_procs)
        by_stage = request.iid is None or self.lengths is not None
        self.options = options if by_stage else options.lengthened(request.iid or 1)
        self.words_per_token, self.num_slices = 1.0, 0
        if stream is not None:
            self.words_per_token = stream.words_per_token
            if request.matrix:
                stream.holdout(0)
                self.num_slices = stream.num_megabatches

    def last(self, name: str) -> Optional[tuple[str, ...]]:
        """Return the values of an option after ``--``; see `study.Job`."""
        return self.options.last(name)

    @property
    def branch(self) -> LRBranch:
        """The decay of the learning rate at the end of a stage."""
        return self.features[LRBranch]

    @property
    def carries_optimizer(self) -> bool:
        """Whether a stage begins with the optimizer of the one before."""
        return bool(self.features[CarriedOptimizer].carry_optimizer)

    @property
    def keeps_best(self) -> bool:
        """Whether fairseq-train keeps the checkpoint with the lowest loss on ``valid``."""
        return bool(self.features[BestCheckpoint].best_checkpoint)

    def part(self, training: Training, part: str) -> Part:
        """Return what features need to know of a part of a training."""
        updates = self.stage_updates(training.model.stage)
        return Part(self.first_update(training), updates, part == BRANCH, training.model.stage)

    def train_options(self) -> dict[str, str]:
        """Return what run.json says of the options after ``--``."""
        return self.given.as_dict()

    def work(self) -> Callable[[StagePlan], float]:
        """Return how the trainings of two stages compare: --max-update ends them alike, epochs by their data."""
        assert self.stream is not None
        sizes = [self.stream.megabatch(t).num_words for t in range(self.stream.num_megabatches)]
        by_updates = self.options.max_update is not None and self.lengths is None
        return lambda plan: 1.0 if by_updates else sum(sizes[t] for t in plan.stage.megabatches)

    def prepare(self, plans: Sequence[StagePlan]) -> "Callable[[Sequence[Run]], TextJob]":
        """Leave the options to fairseq-train, whose message the log has; see `study.Job`."""
        assert self.stream is not None
        if self.request.beginning is not None:  # fairseq-train looks at its sizes
            from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
            from fairseq_alma.checkpoints.ensemble_file import check_dictionary

            check_dictionary(read_checkpoint(self.request.beginning), str(self.request.beginning), self.stream)
        return lambda runs: self

    def print_plan(self, plans: Sequence[StagePlan], folder: RunFolder) -> None:
        """Print the commands of the stages that were asked for; of several seeds, what each alone would run."""
        iid, member = self.request.iid, self.request.member
        evaluation = StageEvaluation.of(self.request.then_evaluate, self.request.stream, self.predictor)
        if iid is not None and self.lengths is None:
            print(f"# --iid {iid}: --max-update and --total-num-update are {iid} times those given")
        for plan in self.request.chosen(plans):
            steps = self.steps(folder, plan)
            if member is not None:
                steps = [step for step in steps if any(model.member in member for model in step.trains)]
            if steps:
                print(f"# {describe_stage(plan, len(plans))}")
            for step in steps:
                for command in step.commands():
                    print(command)
                for words in step.by_hand():
                    print(f"# one split by hand: {shell_words(words)}")
            if evaluation is not None and member is None:
                for words in evaluation.commands(folder, plan):
                    print(shell_words(words))

    def of(self, folder: RunFolder) -> "TextJob":
        """Return the same of another run, which differs by its seed."""
        own = copy(self)
        own.folder = folder
        return own

    def steps(self, folder: RunFolder, plan: StagePlan) -> list[TextStep]:
        """Return the steps of a stage in order; see `loop.Backend`."""
        if folder.root != self.folder.root:
            return self.of(folder).steps(folder, plan)
        parts = (UP_TO_BRANCH, BRANCH, WHOLE) if self.branch.copies else (WHOLE,)
        steps: list[TextStep] = []
        for training in plan.trainings:
            steps += [Grow(self, plan, training)] if training.growth else []
            steps += [Train(self, plan, training, part) for part in parts]
            steps += [Average(self, plan, training)] if self.features.predicts_with == "average" else []
        steps.append(Count(self, plan))
        steps += [TestGrowth(self, plan, training) for training in plan.trainings if training.growth]
        steps += [Join(self, plan)] if plan.combine != "single" else []
        return [*steps, Test(self, plan)]

    def predictor(self, folder: RunFolder, plan: StagePlan) -> tuple[Path, Sequence[Path]]:
        """Return the one checkpoint that stands for all that predicts after a stage; see `study.Job`."""
        if folder.root != self.folder.root:
            return self.of(folder).predictor(folder, plan)
        if plan.combine == "single":
            (model,) = plan.predictors
            return self.predicting(model), ()
        assert plan.combine == "probabilities", plan.combine  # else no learner of text combines
        return self.folder.stage_folder(plan.stage.index) / ENSEMBLE_FILE, ()

    def predicting(self, model: ModelId) -> Path:
        """Return the checkpoint by which a trained model predicts."""
        return predicting_checkpoint(self.folder, model, self.features.predicts_with)

    def begins_from(self, model: ModelId) -> Path:
        """Return the checkpoint of a trained model that a later stage starts from; a best one has its own optimizer."""
        is_best = self.keeps_best and not self.carries_optimizer
        return self.predicting(model) if is_best else self.folder.checkpoint(model)

    def grown(self, model: ModelId) -> Path:
        """Return the checkpoint of a model that has grown and is not trained yet."""
        return self.folder.stage_folder(model.stage) / GROWN_FILE

    def save_folder(self, model: ModelId, part: str) -> Path:
        """Return the save directory of a part of a training; a branch has its own."""
        own = self.folder.model_folder(model)
        return own / BRANCH if part == BRANCH else own

    def stage_updates(self, stage: int) -> Optional[int]:
        """Return the updates of a stage; None: epochs end it."""
        return self.options.max_update if self.lengths is None else self.lengths[stage]

    def num_updates(self, training: Training, part: str) -> Optional[int]:
        """Return the updates that a part of a training has counted when it ends, a branch its own alone.

        None: epochs end it.
        """
        whole = self.stage_updates(training.model.stage)
        if whole is None or part == WHOLE:
            return whole
        branch = self.branch.num_updates(whole, self.first_update(training))
        return branch if part == BRANCH else whole - branch

    def first_update(self, training: Training, part: str = WHOLE) -> int:
        """Return how many updates the optimizer has made when a part of a training begins."""
        stage = training.model.stage
        is_carried = self.carries_optimizer and training.start is not None
        before = sum(self.stage_updates(each) or 0 for each in range(stage)) if is_carried else 0
        return before + ((self.num_updates(training, UP_TO_BRANCH) or 0) if part == BRANCH else 0)

    def strip(self, model: ModelId) -> None:
        """Reduce what is kept of a trained model to its weights, and to what a later stage carries on."""
        last, predicting = self.folder.checkpoint(model), self.predicting(model)
        found = file_identity(last), file_identity(predicting)
        if self.stripped.get(last) == found:
            return
        if not self.carries_optimizer:
            stage_checkpoints.drop_optimizer_state(last)
        stage_checkpoints.keep_only_last(last.parent, [predicting.name])
        if self.keeps_best or self.branch.copies:
            stage_checkpoints.drop_optimizer_state(predicting)
        if self.branch.copies:
            stage_checkpoints.keep_only_last(predicting.parent)
        self.stripped[last] = file_identity(last), file_identity(predicting)

    def keep_only(self, folder: RunFolder, stages: range, needed: Sequence[ModelId], gone: Sequence[ModelId]) -> None:
        """Remove checkpoints that neither a later stage nor the report needs; see `loop.Backend`."""
        if folder.root != self.folder.root:
            self.of(folder).keep_only(folder, stages, needed, gone)
            return
        for model in needed:
            if folder.model_folder(model).is_dir():
                self.strip(model)
        for model in gone:  # only now, when what stays is sure to be on the disk
            for part in (BRANCH, WHOLE):
                stage_checkpoints.remove_all(self.save_folder(model, part))
        for index in stages:
            here = folder.stage_folder(index)
            (here / GROWN_FILE).unlink(missing_ok=True)
            if index != stages[-1]:
                # Its members may be gone, and a later stage has one of its own.
                for name in (ENSEMBLE_FILE, PREDICTIONS_FILE):
                    (here / name).unlink(missing_ok=True)
