"""What a folder that a user gives stands for: the model of a run, the stream that was learned from, the next stage."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional

from fairseq_alma.data.stream import MANIFEST, Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.options import Options, integer, opt, utf8_path
from fairseq_alma.runs.run_folder import RUN_RECORD, RunFolder, stage_predictor
from fairseq_alma.runs.study import is_begun_on

RUN_OF_MODEL = "run"
"""Where the run is in a folder of ``alma-update``."""


@dataclass(frozen=True)
class ArrivalOptions(Options):
    """Of commands that take a run where they take a checkpoint."""

    arrival: Optional[int] = opt(
        None,
        "of a run: take the model that predicts after the arrival of this mega-batch, from 0 (default: the newest)",
        range=integer(0),
    )


def stream_option(help: str = "stream whose tokenizer a checkpoint knows (default: that of its training)") -> Any:
    """Declare ``--stream`` of a command that takes a model."""
    return opt(None, help, parse=utf8_path, metavar="STREAM")


def find_model(path: Path, arrival: Optional[int] = None) -> Path:
    """Return the checkpoint that a run, or a folder with one in it, stands for; another path as it is.

    Args:
        path: what the user gave.
        arrival: of a run: the mega-batch, from 0, after whose arrival the model is wanted; None: the newest.

    Raises:
        AlmaError: it is a run without such a model, or none and there is an arrival.
    """
    run = next((each for each in (path, path / RUN_OF_MODEL) if (each / RUN_RECORD).is_file()), None)
    if run is not None:
        return _predictor(run, arrival)
    if seeds := sorted(path.glob(f"seed-*/{RUN_RECORD}")):
        raise AlmaError(f"{path}: has a run for each seed; give one of them, such as {seeds[0].parent}")
    if arrival is not None:
        raise AlmaError(f"{path}: no run, so there is no model at arrival {arrival}; give the folder of a run")
    return path


def _predictor(path: Path, arrival: Optional[int]) -> Path:
    """Return the checkpoint that predicts after an arrival."""
    run = RunFolder(path)
    records = [record for record in map(run.read_stage, run.stages()) if record is not None]
    if not records:
        raise AlmaError(f"{path}: no stage is complete yet; run alma-stream")
    reached = [max(record["megabatches"]) for record in records]
    arrival = max(reached) if arrival is None else arrival
    if not min(reached) <= arrival <= max(reached):
        raise AlmaError(f"{path}: no model at arrival {arrival}; give one from {min(reached)} to {max(reached)}")
    return stage_predictor(run, [record for record, last in zip(records, reached, strict=True) if last <= arrival][-1])


def stream_folders(recorded: str, near: Path) -> Iterator[Path]:
    """Yield the streams that a path in a record may mean, the likeliest first.

    Paths are relative to the folder that a command was given in, which is often one above the run; or stream and run
    were moved together.

    Args:
        recorded: what the record says.
        near: the checkpoint, or the run.
    """
    places = [Path(recorded)]
    for parent in near.absolute().parents:
        places += [parent / recorded, parent / places[0].name]
    yield from dict.fromkeys(place for place in places if (place / MANIFEST).is_file())


def stream_of_run(run: RunFolder, record: Mapping[str, Any]) -> Path:
    """Return where the stream is that a run was begun on; the path in its record where it is not found."""
    recorded = record["stream"]["path"]
    for path in stream_folders(recorded, run.root):
        with contextlib.suppress(AlmaError):  # another one, that is damaged
            if is_begun_on(record, Stream.open(path)):
                return path
    return Path(recorded)


def stream_of(checkpoint: dict[str, Any], path: Path, given: Optional[Path], kind: str = "text") -> Stream:
    """Return the stream that a model was trained on, or a given one; raise AlmaError if it has another dictionary.

    Args:
        checkpoint: the model's.
        path: its file; where it is part of a run, the stream is the one that the run was begun on.
        given: by the user.
        kind: of data.
    """
    from fairseq_alma.checkpoints.ensemble_file import check_dictionary  # torch, which takes seconds

    stream = Stream.open(_trained_on(checkpoint, path) if given is None else given)
    if stream.kind != kind:
        raise AlmaError(
            f"--stream {stream.root}: a stream of {stream.kind}; give the stream of {kind} that it was trained on"
        )
    if kind == "text":
        check_dictionary(checkpoint, str(path), stream)
        stream.verify(["test"])
    return stream


def _trained_on(checkpoint: dict[str, Any], path: Path) -> Path:
    """Return the folder of the stream that a checkpoint names, wherever the command was given."""
    recorded = (checkpoint["cfg"].get("task") or {}).get("data")
    if not isinstance(recorded, str):
        raise AlmaError(f"{path}: does not say which stream it was trained on; give --stream")
    root = next((parent for parent in path.absolute().parents if (parent / RUN_RECORD).is_file()), None)
    record = None if root is None else RunFolder(root).read_run()
    if root is not None and record is not None and (found := stream_of_run(RunFolder(root), record)).is_dir():
        return found
    found = next(stream_folders(recorded, path), Path(recorded))
    if not found.is_dir():
        raise AlmaError(f"{path}: trained on {recorded}, which is not there any more; give --stream")
    return found
