"""Find the checkpoint of a run, and the stream that a model or a run was trained on."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from fairseq_alma.data.stream import MANIFEST, Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.options import Options, integer, opt
from fairseq_alma.runs.run_folder import RUN_RECORD, RunFolder, stage_predictor
from fairseq_alma.runs.study import is_begun_on

RUN_OF_MODEL = "run"
"""Directory name of the run within a folder of ``alma-update``."""


@dataclass(frozen=True)
class ArrivalOptions(Options):
    """Options of commands that accept a run in place of a checkpoint."""

    arrival: Optional[int] = opt(
        None,
        "if a run is given: model after the arrival of this mega-batch, from 0 (default: newest)",
        range=integer(0),
    )


def find_model(path: Path, arrival: Optional[int] = None) -> Path:
    """Return the checkpoint of a run after an arrival (from 0; None: newest), or ``path`` if it is not a run.

    ``path`` may also be a folder that contains a run. Raises AlmaError if the run has no model for the arrival.
    """
    root = next((each for each in (path, path / RUN_OF_MODEL) if (each / RUN_RECORD).is_file()), None)
    if root is None:
        if seeds := sorted(path.glob(f"seed-*/{RUN_RECORD}")):
            raise AlmaError(f"{path}: has one run for each seed; give one of them, such as {seeds[0].parent}")
        if arrival is not None:
            raise AlmaError(f"{path}: not a run, so it has no model at arrival {arrival}; give a run directory")
        return path
    run = RunFolder(root)
    records = [record for record in map(run.read_stage, run.stages()) if record is not None]
    if not records:
        raise AlmaError(f"{root}: no stage is complete yet; run alma-stream")
    last = [max(record["megabatches"]) for record in records]
    arrival = last[-1] if arrival is None else arrival
    if not last[0] <= arrival <= last[-1]:
        raise AlmaError(f"{root}: no model at arrival {arrival}; give one from {last[0]} to {last[-1]}")
    return stage_predictor(run, records[sum(end <= arrival for end in last) - 1])


def _stream_folders(recorded: str, near: Path) -> list[Path]:
    """Return the stream folders that a recorded path may refer to, the most likely folder first.

    The path is relative to the working directory of a command, often one above the run or checkpoint ``near``; stream
    and run may have been moved together.
    """
    places = [Path(recorded)]
    for parent in near.absolute().parents:
        places += [parent / recorded, parent / places[0].name]
    return [place for place in dict.fromkeys(places) if (place / MANIFEST).is_file()]


def stream_of(checkpoint: dict[str, Any], path: Path, given: Optional[Path], kind: str = "text") -> Stream:
    """Return the stream that the user gave, else the training stream recorded in the run or the checkpoint.

    Raises AlmaError if the stream is missing, contains other data than ``kind``, or has another dictionary.
    """
    from fairseq_alma.checkpoints.ensemble_file import check_dictionary  # imports torch, which takes seconds

    found = given
    if found is None:
        recorded = (checkpoint["cfg"].get("task") or {}).get("data")
        if not isinstance(recorded, str):
            raise AlmaError(f"{path}: does not name the stream of its training; give --stream")
        found = next(iter(_stream_folders(recorded, path)), Path(recorded))
        roots = [parent for parent in path.absolute().parents if (parent / RUN_RECORD).is_file()]
        if roots and (record := RunFolder(roots[0]).read_run()) is not None:
            for each in reversed(_stream_folders(record["stream"]["path"], roots[0])):
                with contextlib.suppress(AlmaError):  # a damaged stream
                    found = each if is_begun_on(record, Stream.open(each)) else found
        if not found.is_dir():
            raise AlmaError(f"{path}: its stream {recorded} is missing; give --stream")
    stream = Stream.open(found)
    if stream.kind != kind:
        raise AlmaError(f"--stream {stream.root}: a stream of {stream.kind}; give a stream of {kind}")
    if kind == "text":
        check_dictionary(checkpoint, str(path), stream)
        stream.verify(["test"])
    return stream
