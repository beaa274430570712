"""The functions of ``alma-prep-text`` as pipeline steps of datatrove, for its executors: this machine, SLURM, Ray.

A stage's ranks share the pieces of the input and leave files that appear when they are complete; datatrove skips the
ranks that are done. The stream is the same to the last byte whoever makes it. Needs the extra ``[cluster]``.
"""

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence

from datatrove.executor import SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.base import PipelineStep

from data_prep.build_folder import publish_additions, publish_stream
from data_prep.text import steps
from data_prep.text.command import completed_before, record_of, stream_to_make
from data_prep.text.options import PrepOptions, parse_options
from data_prep.text.workers import default_workers
from data_prep.text.writing import write_stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import open_atomically, work_folder

STAGES = ("plan", "hash", "cut", "sample", "prepare", "encode", "publish")
SINGLE = ("plan", "cut", "prepare", "publish")
"""The stages with one rank."""


class StreamStage(PipelineStep):
    """A stage, which needs a pipeline of its own: its ranks begin when all of the stage before are done.

    Args:
        name: one of `STAGES`.
        options: of the stream.
        folder: the work folder, which all ranks see.
    """

    type = "alma"

    def __init__(self, name: str, options: PrepOptions, folder: str) -> None:
        self.name = name
        super().__init__()
        self.options, self.folder = options, folder

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Do this rank's share of the stage.

        Raises:
            AlmaError: the input or the options do not allow it, or documents come from a step before it.
        """
        if data is not None:
            raise AlmaError(
                f"{self.name}: needs a pipeline of its own; end the one before with a writer, as JsonlWriter, and give "
                "its folder as INPUT"
            )
        steps.forget()
        if self.name == "plan":
            there = stream_to_make(self.options)
            if there is not None and not self.options.append:
                raise AlmaError(f"--out {self.options.out}: a stream is there; give another folder, or --append")
            steps.make_plan(self.options, there, self.folder, None, default_workers())
            return
        plan = steps.plan_of(self.folder)
        if plan.options != self.options:
            raise AlmaError(
                f"{self.folder}: holds the work of a command with other options; give another folder, also for the logs"
            )
        if self.name == "publish":
            self._publish(plan)
        elif self.name in SINGLE:
            {"cut": steps.cut_documents, "prepare": steps.prepare_encoding}[self.name](self.folder)
        else:
            for number in range(rank, len(plan.pieces), world_size):
                self._do_piece(number)

    def _do_piece(self, number: int) -> None:
        if self.name != "encode":
            function = steps.hash_piece if self.name == "hash" else steps.sample_piece
            for num_bytes in function(self.folder, number):
                self.stat_update("bytes", value=num_bytes, unit="piece")
            return
        with open_atomically(Path(self.folder, f"encoded-{number:05d}.pickle"), durable=False) as file:
            for encoded in steps.encode_piece(self.folder, number):
                pickle.dump(encoded, file)
                self.stat_update("bytes", value=encoded.bytes_read, unit="piece")

    def _publish(self, plan: steps.Plan) -> None:
        plan.refuse_changes()
        digests = [each for number in range(len(plan.sources)) for each in steps.digest_source(self.folder, number)]
        record = record_of(plan, digests)
        with work_folder(plan.options.out, "alma-prep-text") as root:
            there = stream_to_make(plan.options)
            if there is not None and completed_before(plan.options, there, record):
                return
            if (there and there.fingerprint) != (plan.there and plan.there.fingerprint):
                raise AlmaError(
                    f"--out {plan.options.out}: something was appended meanwhile; give another folder for the work"
                )
            stream = write_stream(plan, self.folder, root / "stream", self._blocks(len(plan.pieces)), record)
            (publish_stream if there is None else publish_additions)(root / "stream", stream)

    def _blocks(self, num_pieces: int) -> Iterator[steps.Encoded]:
        for number in range(num_pieces):
            path = Path(self.folder, f"encoded-{number:05d}.pickle")
            with open(path, "rb") as file:
                while file.tell() < path.stat().st_size:
                    yield pickle.load(file)


def stream_stages(words: Sequence[str], work: str) -> list[StreamStage]:
    """Return the stages from text to a stream, in order; each needs a pipeline of its own.

    Args:
        words: of a command line of ``alma-prep-text``; ``--workers`` decides nothing here.
        work: folder for what is between input and stream, which all ranks see; it may be deleted afterwards.

    Raises:
        AlmaError: an input is standard input.
    """
    options = parse_options(words)
    if "-" in options.inputs:
        raise AlmaError("INPUT -: standard input cannot be read by several machines; write it to a file first")
    inputs = tuple(map(os.path.abspath, options.inputs))
    tokenizer = None if options.tokenizer is None else options.tokenizer.absolute()
    options = replace(options, inputs=inputs, out=options.out.absolute(), tokenizer=tokenizer, workers=1)
    return [StreamStage(name, options, os.path.abspath(work)) for name in STAGES]


def run_stages(
    stages: Sequence[StreamStage],
    executor: Callable[..., PipelineExecutor],
    tasks: int,
    logging_dir: str,
    depends: Optional[PipelineExecutor] = None,
    **options: Any,
) -> None:
    """Run stages one after the other; on SLURM: queue them, each to begin when the one before has succeeded.

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
        depends = executor(
            pipeline=[stage],
            tasks=1 if stage.name in SINGLE else tasks,
            logging_dir=f"{logging_dir}/{stage.name}",
            depends=depends,
            **({"job_name": stage.name} if is_queued else {}),
            **options,
        )
        if not is_queued:
            depends.run()
            if depends.get_incomplete_ranks(skip_completed=True):
                raise AlmaError(f"{stage.name}: not all ranks are done; {logging_dir}/{stage.name}/logs says why")
    if is_queued and depends is not None:
        depends.run()
