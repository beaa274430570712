"""``alma-stream`` on streams of text: stock commands in processes of their own."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Optional, Sequence

from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import refuse_no_file
from fairseq_alma.learners.plan import StagePlan
from fairseq_alma.runs.evaluation import StageEvaluation
from fairseq_alma.runs.loop import Run
from fairseq_alma.runs.request import RunRequest
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.terminal import shell_words
from fairseq_alma.text.anytime_checks import check_schedule
from fairseq_alma.text.text_backend import TextBackend
from fairseq_alma.text.text_commands import TextCommands
from fairseq_alma.text.train_options import TrainOptions
from fairseq_alma.watch.run_display import describe_stage

if TYPE_CHECKING:
    from fairseq_alma.checkpoints.model_facts import ModelFacts


class TextJob:
    """What alma-stream does with text; see `request.Job`.

    Args:
        request: what stands before ``--``.
        words: what stands after it.
        stream: the data; None: a dry run does without.

    Raises:
        ValueError: an option after ``--`` is wrong.
    """

    unit = "word"
    overridden: tuple[str, ...] = ()

    def __init__(self, request: RunRequest, words: Sequence[str], stream: Optional[Stream]) -> None:
        self.request, self.stream = request, stream
        self.options = TrainOptions(words, request.learner.owned)
        if request.learner.trains_jointly:
            self.options.joint(1)  # refuses what cannot be
        options = self.options if request.num_procs == 1 else self.options.shared(request.num_procs)
        self.commands = TextCommands(
            stream=request.stream,
            folder=request.folder(request.seeds[0]),
            options=options if request.iid is None else options.lengthened(request.iid),
            wait=request.iid or request.wait,
            replay=request.replay,
            save_every=request.save_every,
            validate=request.validate,
            keep_checkpoints=request.keep_checkpoints,
            num_procs=request.num_procs,
            nodes=request.nodes,
            anytime=request.anytime,
            beginning=request.finetune_from_model,
            matrix=self._matrix_size(),
        )

    def _matrix_size(self) -> int:
        """Return how many mega-batches --matrix looks at. Raises AlmaError if nothing is held out of them."""
        if not self.request.matrix or self.stream is None:
            return 0
        self.stream.holdout(0)
        return self.stream.num_megabatches

    def recorded(self) -> dict[str, Any]:
        """Return the options that run.json names; see `request.Job`."""
        start = self.request.finetune_from_model
        started = {} if start is None else {"finetune_from_model": str(start)}
        matrix = {"matrix": True} if self.request.matrix else {}
        return {"save_every": self.request.save_every, "validate": self.request.validate, **started, **matrix}

    def check(self, plans: Sequence[StagePlan]) -> None:
        """Refuse options after ``--`` that contradict those before it; see `request.Job`."""
        check_schedule(self.request.anytime, self.commands.options, plans)

    def train_options(self) -> dict[str, str]:
        """Return what run.json says of the options after ``--``."""
        return self.options.as_dict()

    def print_plan(self, plans: Sequence[StagePlan]) -> None:
        """Print the commands of the stages that were asked for."""
        iid, member = self.request.iid, self.request.member
        evaluation = StageEvaluation.of(self.request.then_evaluate, self.request.stream, self.predictor)
        if iid is not None:
            print(f"# --iid {iid}: --max-update and --total-num-update are {iid} times those given")
        for plan in self.request.chosen(plans):
            commands = self.commands.all_of(plan)
            if member is not None:
                chosen = [each for each in plan.trainings if each.model.member in member]
                commands = [command for each in chosen for command in self.commands.trainings(plan, each)]
            if commands:
                print(f"# {describe_stage(plan, len(plans))}")
            for each in commands:
                print(each.shell())
            if evaluation is not None and member is None:
                for words in evaluation.commands(self.commands.folder, plan):
                    print(shell_words(words))

    def predictor(self, folder: RunFolder, plan: StagePlan) -> tuple[Path, Sequence[Path]]:
        """Return the checkpoint that was tested after a stage; see `request.Job`."""
        return self.commands.predictor(plan), ()

    def work(self) -> Callable[[StagePlan], float]:
        """Return how the trainings of two stages compare: --max-update ends them alike, epochs by their data."""
        assert self.stream is not None
        sizes = [self.stream.megabatch(t).num_words for t in range(self.stream.num_megabatches)]
        by_updates = self.commands.options.max_update
        return lambda plan: 1.0 if by_updates else sum(sizes[t] for t in plan.stage.megabatches)

    def prepare(self, plans: Sequence[StagePlan]) -> Callable[[Sequence[Run]], TextBackend]:
        """Leave the options to fairseq-train, whose message the log has; see `request.Job`."""
        assert self.stream is not None
        if self.request.finetune_from_model is not None:
            _require_beginning(self.request.finetune_from_model, self.stream)
        words_per_token = self.stream.words_per_token
        return lambda runs: TextBackend(self.commands, _describe, words_per_token)


def _require_beginning(path: Path, stream: Stream) -> None:
    """Raise AlmaError unless a checkpoint is one, of the stream's vocabulary; fairseq-train looks at its sizes."""
    from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
    from fairseq_alma.checkpoints.ensemble_file import check_dictionary

    refuse_no_file(path, "--finetune-from-model", "give a checkpoint that alma-import or fairseq-train wrote")
    check_dictionary(read_checkpoint(path), str(path), stream)


def _describe(path: Path) -> "ModelFacts":
    # Imports torch, which takes seconds; a dry run needs none of it.
    from fairseq_alma.checkpoints.model_facts import describe_checkpoint

    return describe_checkpoint(path)
