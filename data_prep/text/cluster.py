"""The steps of ``alma-prep-text`` as stages of datatrove, for its executors: this machine, SLURM, Ray.

One deal, no second one: a stage's ranks share the tasks of a `Step`, which leave files that appear when they are whole,
so the stream is the same to the last byte whoever makes it. Filters stand before, in pipelines of their own that write
files. Needs the extra ``fairseq-alma[cluster]``.
"""

import hashlib
import os
import pickle
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Callable, Generator, Iterator, Optional, Sequence

from datatrove.executor import SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.base import PipelineStep

from data_prep.build_folder import BuildFolder
from data_prep.text.command import STEPS, completed_before, finish, record_of, refuse_unfit, stream_to_make
from data_prep.text.encoding import WriteFiles
from data_prep.text.options import PrepOptions, parse_options
from data_prep.text.passes import Folder, SingleStep, Step, Task, Work
from data_prep.text.pieces import cut_into_pieces
from data_prep.text.pool import Progress, default_workers
from data_prep.text.source import find_sources
from fairseq_alma.errors import AlmaError

_PLAN, _DIGESTS = "plan.pickle", "digests.pickle"


class DigestInput(Step):
    """Take the sha256 of the files that begin in a piece, for the stream's history."""

    title = "checksums"
    leaves = _DIGESTS

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        digests = []
        for part in work.pieces[number].parts:
            if part.start == 0:
                with open(part.source.path, "rb") as file:
                    digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]  # typeshed: no readinto
                digests.append(digest.hexdigest())
                yield part.source.size, 0
        work.of_piece(number).write(_DIGESTS, pickle.dumps(digests))


@dataclass(frozen=True)
class _Plan:
    """What all stages but the first are told.

    Attributes:
        options: of the command.
        work: what is to be done.
        stamps: of the files of the input, by which a change shows.
    """

    options: PrepOptions
    work: Work
    stamps: Sequence[object]


class StreamStage(PipelineStep):
    """A stage, which needs a pipeline of its own: its ranks begin when all of the stage before are done.

    Args:
        name: of the stage.
        options: of the stream.
        work: the folder for what is between input and stream.
    """

    type = "alma"
    is_single = True
    """Whether there is a single task to do."""

    def __init__(self, name: str, options: PrepOptions, work: str) -> None:
        self.name = name
        super().__init__()
        self.options = options
        self.work = work

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Do this rank's share of the tasks that are not done yet.

        Raises:
            AlmaError: the input or the options do not allow it, or documents come from a step before it.
        """
        if data is not None:
            raise AlmaError(
                f"{self.name}: needs a pipeline of its own; end the one before with a writer, as JsonlWriter, and give "
                "its folder as INPUT"
            )
        self._run(rank, world_size)

    def _run(self, rank: int, world_size: int) -> None:
        raise NotImplementedError

    def _plan(self) -> _Plan:
        plan = pickle.loads(Folder(self.work).read(_PLAN))
        if plan.options != self.options:
            raise AlmaError(
                f"{self.work}: holds the work of a command with other options; give another folder, also for the logs"
            )
        return plan


class PlanStage(StreamStage):
    """List the input and cut it into pieces."""

    def _run(self, rank: int, world_size: int) -> None:
        if rank:
            return
        options, folder = self.options, Folder(self.work)
        sources = find_sources(options.inputs, options.form, options.text_field, None, options.out, options.group)
        refuse_unfit(options, sources)
        stamps = [source.stamp for source in sources]
        if folder.exists(_PLAN):
            plan = self._plan()
            if (plan.work.sources, plan.stamps) != (sources, stamps):
                raise AlmaError(f"{self.work}: holds the work of a command with other input; give another folder")
            return
        there = stream_to_make(options)
        if there is not None:
            if not options.append:
                raise AlmaError(f"--out {options.out}: a stream is there; give another folder, or --append")
            there.verify([])
        work = Work(options, sources, cut_into_pieces(sources), folder, folder / "stream", there)
        folder.write(_PLAN, pickle.dumps(_Plan(options, work, stamps)))


class TaskStage(StreamStage):
    """Do steps of the deal.

    Args:
        steps: which do not need each other.
    """

    def __init__(self, name: str, options: PrepOptions, work: str, *steps: Step) -> None:
        super().__init__(name, options, work)
        self.steps = steps
        self.is_single = all(isinstance(step, SingleStep) for step in steps)

    def _run(self, rank: int, world_size: int) -> None:
        work = self._plan().work
        for step in self.steps:
            if step.takes_memory:
                work = replace(work, num_workers=default_workers())
            for num_bytes, num_words in _do(step, work, rank, world_size):
                self.stat_update("bytes", value=num_bytes, unit="task")
                self.stat_update("words", value=num_words, unit="task")


def _do(step: Step, work: Work, rank: int = 0, world_size: int = 1) -> Iterator[Progress]:
    for number in range(rank, step.num_tasks(work), world_size):
        yield from Task(step, work)(number)


class PublishStage(StreamStage):
    """Write the manifest, and bring the stream to its place."""

    def _run(self, rank: int, world_size: int) -> None:
        if rank:
            return
        plan = self._plan()
        work, options = plan.work, plan.options
        if [source.stamp for source in work.sources] != plan.stamps:
            raise AlmaError(f"{self.work}: the input changed meanwhile; give another folder, also for the logs")
        digests = [
            each for piece in range(len(work.pieces)) for each in pickle.loads(work.of_piece(piece).read(_DIGESTS))
        ]
        record = record_of(options, work.sources, digests)
        with BuildFolder(options.out, "alma-prep-text") as build:
            there = stream_to_make(options)
            if there is not None and completed_before(options, there, record):
                return
            if (there and there.fingerprint) != (work.there and work.there.fingerprint):
                raise AlmaError(
                    f"--out {options.out}: something was appended meanwhile; give another folder for the work"
                )
            deque(_do(WriteFiles(), work), maxlen=0)  # again, where a killed one has moved them
            stream = finish(work, record)
            work.out.move_to(build.path)
            (build.publish_stream if there is None else build.publish_additions)(stream)


def stream_stages(words: Sequence[str], work: str) -> list[StreamStage]:
    """Return the stages from text to a stream, in their order; each needs a pipeline of its own.

    Args:
        words: of a command line of ``alma-prep-text``; ``--workers`` decides nothing here.
        work: folder for what is between input and stream, which all tasks see.

    Raises:
        AlmaError: an input is standard input.
    """
    options = parse_options(words)
    if "-" in options.inputs:
        raise AlmaError("INPUT -: standard input cannot be read by several machines; write it to a file first")
    inputs = tuple(os.path.abspath(given) for given in options.inputs)
    tokenizer = None if options.tokenizer is None else options.tokenizer.absolute()
    options = replace(options, inputs=inputs, out=options.out.absolute(), tokenizer=tokenizer, workers=1)
    work = os.path.abspath(work)
    counting, *others = STEPS
    stages: list[StreamStage] = [PlanStage("plan", options, work)]
    stages.append(TaskStage(_named(counting), options, work, DigestInput(), counting))
    stages += [TaskStage(_named(step), options, work, step) for step in others]
    return [*stages, PublishStage("publish", options, work)]


def _named(step: Step) -> str:
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in type(step).__name__)[1:]


def run_stages(
    stages: Sequence[StreamStage],
    executor: Callable[..., PipelineExecutor],
    tasks: int,
    logging_dir: str,
    depends: Optional[PipelineExecutor] = None,
    **options: Any,
) -> None:
    """Run stages, one after the other; on SLURM: queue them, each to begin when the one before has succeeded.

    Args:
        stages: as `stream_stages` gives them.
        executor: ``LocalPipelineExecutor``, ``SlurmPipelineExecutor``, ``RayPipelineExecutor``.
        tasks: ranks of a stage that has more than one.
        logging_dir: where datatrove keeps the logs, and which ranks are done.
        depends: what has to be done before.
        options: of the executor.

    Raises:
        AlmaError: not all ranks of a stage are done, and the executor did not raise why.
    """
    is_queued = isinstance(executor, type) and issubclass(executor, SlurmPipelineExecutor)
    for stage in stages:
        named = {"job_name": stage.name, **options} if is_queued else options
        depends = executor(
            pipeline=[stage],
            tasks=1 if stage.is_single else tasks,
            logging_dir=f"{logging_dir}/{stage.name}",
            depends=depends,
            **named,
        )
        if not is_queued:
            depends.run()
            if depends.get_incomplete_ranks(skip_completed=True):
                raise AlmaError(f"{stage.name}: not all ranks are done; {logging_dir}/{stage.name}/logs says why")
    if is_queued and depends is not None:
        depends.run()
