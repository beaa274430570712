"""Find the checkpoint of a run, and the training stream of a model."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from fairseq_alma.data.stream import MANIFEST, Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.options import Options, integer, opt
from fairseq_alma.runs.run_folder import RUN_RECORD, RunFolder, find_run, runs_of_seeds, stage_predictor
from fairseq_alma.runs.study import is_begun_on


@dataclass(frozen=True)
class ArrivalOptions(Options):
    """Option ``--arrival`` of commands that accept a run in place of a checkpoint."""

    arrival: Optional[int] = opt(
        None,
        "index (numbered from 0) of the arrival whose model is used, if a run is given (default: newest arrival)",
        range=integer(0),
    )


def find_model(path: Path, arrival: Optional[int] = None) -> Path:
    """Return the path of a run's checkpoint after an arrival, or ``path`` if ``path`` does not contain a run.

    Args:
        path: checkpoint, run folder, or folder of ``alma-update``.
        arrival: index of the arrival (numbered from 0); None for the newest arrival.

    Raises:
        AlmaError: the run has no model for the arrival, ``path`` contains several runs, or
            ``arrival`` is given without a run.
    """
    root = find_run(path)
    if root is None:
        if runs := runs_of_seeds(path):
            raise AlmaError(f"{path}: expected a run, found a folder of runs; give one run, such as {runs[0]}")
        if arrival is not None and path.exists():
            raise AlmaError(f"--arrival {arrival}: expected a run, found {path}; give a run, or remove --arrival")
        return path
    run = RunFolder(root)
    records = [record for record in map(run.read_stage, run.stages()) if record is not None]
    if not records:
        raise AlmaError(f"{root}: expected a complete stage, found none; run alma-stream")
    last = [max(record["megabatches"]) for record in records]
    arrival = last[-1] if arrival is None else arrival
    if not last[0] <= arrival <= last[-1]:
        raise AlmaError(f"{root}: no model at arrival {arrival}; give an arrival from {last[0]} to {last[-1]}")
    return stage_predictor(run, records[sum(end <= arrival for end in last) - 1])


def _stream_folders(recorded: str, near: Path) -> list[Path]:
    """Return the existing streams that a recorded path may refer to, most likely first.

    A relative path is relative to the working directory of the command that recorded the path, often a parent of
    ``near`` (run or checkpoint). The user may have moved the run and the stream together.
    """
    names = recorded, Path(recorded).name
    places = [Path(recorded), *(parent / name for parent in near.absolute().parents for name in names)]
    return [place for place in dict.fromkeys(places) if (place / MANIFEST).is_file()]


def stream_of(checkpoint: dict[str, Any], path: Path, given: Optional[Path]) -> Stream:
    """Return the stream of a language model: the stream ``given`` by the user, else the training stream.

    Raises:
        AlmaError: the stream is missing, damaged or of another kind, or the dictionaries of model and stream differ.
    """
    from fairseq_alma.checkpoints.checkpoint_file import check_dictionary  # imports torch, which takes seconds

    found = given
    if found is None:
        recorded = (checkpoint["cfg"].get("task") or {}).get("data")
        if not isinstance(recorded, str):
            raise AlmaError(f"{path}: the checkpoint records no training stream; give --stream STREAM")
        found = next(iter(_stream_folders(recorded, path)), Path(recorded))
        root = next((parent for parent in path.absolute().parents if (parent / RUN_RECORD).is_file()), None)
        if root is not None and (record := RunFolder(root).read_run()) is not None:
            for each in reversed(_stream_folders(record["stream"]["path"], root)):
                with contextlib.suppress(AlmaError):  # the stream is damaged
                    found = each if is_begun_on(record, Stream.open(each)) else found
        if not found.is_dir():
            raise AlmaError(f"{path}: training stream {recorded} not found; give --stream STREAM")
    stream = Stream.open(found, "text")
    check_dictionary(checkpoint, str(path), stream)
    stream.verify(["test"])
    return stream
