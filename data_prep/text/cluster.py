"""Run the steps of ``alma-prep-text`` as datatrove pipeline steps, on one machine, SLURM or Ray.

A stage is one step of the conversion. Its ranks (datatrove tasks) share the pieces of the input (see ``documents``) and
write files atomically. On a repeated run, datatrove skips completed ranks. ``alma-prep-text`` makes a byte-identical
stream from the same input and options. The module requires the extra ``[cluster]``.
"""

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence

from datatrove.executor import SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.base import PipelineStep

from data_prep.text.command import (
    PrepOptions,
    completed_before,
    default_workers,
    existing_stream,
    parse_options,
    record_of,
)
from data_prep.text.steps import Encoded, Work, make_plan, write_stream
from fairseq_alma.data.stream import publish_stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import open_atomically, work_folder

STAGES = ("plan", "hash", "assign", "sample", "prepare", "count", "encode", "publish")
SINGLE = ("plan", "assign", "prepare", "publish")  # stages that use a single rank


class StreamStage(PipelineStep):
    """Pipeline step that runs one of `STAGES`. The pipeline must have no other step.

    The ranks of a stage may start only when all ranks of the previous stage are complete.
    """

    type = "alma"

    def __init__(self, name: str, options: PrepOptions, folder: str) -> None:
        self.name = name
        super().__init__()
        self.options, self.folder = options, folder

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Run the stage on the pieces of this rank.

        Raises:
            AlmaError: the input, options, stream or work folder is unsuitable, or the pipeline has an earlier step.
        """
        if data is not None:
            raise AlmaError(
                f"{self.name}: expected a pipeline with only this step, found an earlier step; run the earlier "
                "steps in another pipeline that ends with a writer (JsonlWriter), and give the output folder as INPUT"
            )
        work = Work(self.folder)
        if self.name == "plan":
            there = existing_stream(self.options)
            if there is not None and not self.options.append:
                raise AlmaError(f"--out {self.options.out}: the stream exists; give another folder, or --append")
            return work.save("plan", make_plan(there, self.options, None, default_workers()))
        if work.plan.options != self.options:
            raise _other_command(self.folder)
        if self.name == "publish":
            return self._publish(work)
        if self.name in SINGLE:
            return getattr(work, self.name)()
        for number in range(rank, len(work.plan.pieces), world_size):
            if self.name != "encode":
                for num_bytes in getattr(work, self.name)(number):
                    self.stat_update("bytes", value=num_bytes, unit="piece")
                continue
            with open_atomically(Path(self.folder, f"encoded-{number:05d}"), durable=False) as file:
                for encoded in work.encode(number):
                    pickle.dump(encoded, file)
                    self.stat_update("bytes", value=encoded.bytes_read, unit="piece")

    def _publish(self, work: Work) -> None:
        plan = work.plan
        plan.refuse_changes()
        record = record_of(plan, [each for number in range(len(plan.sources)) for each in work.digest(number)])
        with work_folder(plan.options.out, "alma-prep-text") as root:
            there = existing_stream(plan.options)
            if there is not None and completed_before(plan.options, there, record):
                return
            if (there and there.fingerprint) != (plan.there and plan.there.fingerprint):
                raise AlmaError(
                    f"--out {plan.options.out}: another command changed the stream after the plan stage; give another "
                    "work folder and another logging_dir"
                )
            stream = write_stream(work, root / "stream", self._encoded(len(plan.pieces)), record)
            publish_stream(root / "stream", stream)

    def _encoded(self, num_pieces: int) -> Iterator[Encoded]:
        for number in range(num_pieces):
            path = Path(self.folder, f"encoded-{number:05d}")
            with open(path, "rb") as file:
                while file.tell() < path.stat().st_size:
                    yield pickle.load(file)


def stream_stages(words: Sequence[str], work: str) -> list[StreamStage]:
    """Return the stages that make a stream, in order. Each stage needs a separate pipeline.

    Args:
        words: command-line arguments of ``alma-prep-text``. ``--workers`` has no effect.
        work: work folder that all ranks can access; it can be deleted after the last stage.

    Raises:
        AlmaError: an input is ``-`` (standard input).
    """
    options = parse_options(words)
    if "-" in options.inputs:
        raise AlmaError("INPUT -: several machines cannot share standard input; write the text to a file first")
    options = replace(
        options,
        inputs=tuple(map(os.path.abspath, options.inputs)),
        out=options.out.absolute(),
        tokenizer=options.tokenizer and options.tokenizer.absolute(),
        workers=1,
    )
    return [StreamStage(name, options, os.path.abspath(work)) for name in STAGES]


def run_stages(
    stages: Sequence[StreamStage],
    executor: Callable[..., PipelineExecutor],
    tasks: int,
    logging_dir: str,
    depends: Optional[PipelineExecutor] = None,
    **options: Any,
) -> None:
    """Run stages one after the other. With SLURM, submit all stages, each with a dependency on the previous stage.

    Args:
        stages: stages returned by `stream_stages`.
        executor: ``LocalPipelineExecutor``, ``SlurmPipelineExecutor`` or ``RayPipelineExecutor``.
        tasks: number of ranks of a stage. The stages in `SINGLE` use one rank.
        logging_dir: folder in which datatrove stores logs and the list of completed ranks of each stage.
        depends: pipeline that must complete before the first stage starts; None: start immediately.
        options: additional arguments of the executor.

    Raises:
        AlmaError: the work folder or ``logging_dir`` is of a command with other options or input; or a rank of a stage
            did not complete, and the executor did not raise the error of the rank.
    """
    # datatrove skips completed ranks, so the options and input of these ranks must be the same.
    folder = stages[0].folder
    plan = Work(folder).plan if Path(folder, "plan").exists() else None
    if plan is not None and plan != make_plan(plan.there, stages[0].options, None, plan.num_workers):
        raise _other_command(folder)
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
        if stage.name == "plan" and plan is None and not depends.get_incomplete_ranks(skip_completed=True):
            raise AlmaError(
                f"{logging_dir}: the stages completed with another work folder; give another logging_dir, or remove it"
            )
        if not is_queued:
            depends.run()
            if depends.get_incomplete_ranks(skip_completed=True):
                raise AlmaError(
                    f"{stage.name}: some ranks did not complete; find the error in {logging_dir}/{stage.name}/logs, "
                    "and run the stages again"
                )
    if is_queued and depends is not None:
        depends.run()


def _other_command(folder: str) -> AlmaError:
    return AlmaError(
        f"{folder}: the folder contains files of a command with different options or input; give another work folder "
        "and another logging_dir, or remove both"
    )
