"""What a notebook needs, in a few calls; what each needs (torch, transformers, pandas) is imported when it is called.

The examples are run as tests, in the folder that ``recipes/tour.py`` leaves behind.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Iterable, Optional, Union

from fairseq_alma.errors import AlmaError

if TYPE_CHECKING:
    from pandas import DataFrame

    from fairseq_alma.data.stream import Stream
    from fairseq_alma.exchange.load_model import LoadedModel
    from fairseq_alma.runs.run_folder import RunFolder

AnyPath = Union[str, Path]


def open_stream(path: AnyPath) -> "Stream":
    """Open a stream.

    >>> import fairseq_alma
    >>> stream = fairseq_alma.open_stream("stream")
    >>> stream.num_megabatches, stream.kind
    (2, 'text')

    Args:
        path: folder that ``alma-prep-text`` or ``alma-prep-images`` wrote.

    Raises:
        AlmaError: it is none, or damaged.
    """
    from fairseq_alma.data.stream import Stream

    return Stream.open(path)


def read_run(path: AnyPath) -> "DataFrame":
    """Read a run: a row for each arrival.

    >>> import fairseq_alma
    >>> arrivals = fairseq_alma.read_run("run")
    >>> list(arrivals.arrival), list(arrivals.experts)
    ([0, 1], [2.0, 4.0])
    >>> bool(arrivals.value.iloc[1] < arrivals.value.iloc[0])  # test perplexity
    True

    Args:
        path: folder that ``alma-stream`` wrote; the run may still be going.

    Returns:
        Columns as `report.read_run.RunTable.arrivals`: ``value`` is the test perplexity, or for images the error.

    Raises:
        AlmaError: it is no run, or damaged.
    """
    from fairseq_alma.report import read_run as reader

    return reader.RunTable.of([reader.read_run(Path(path))]).arrivals


def load_model(path: AnyPath, arrival: Optional[int] = None, stream: Optional[AnyPath] = None) -> "LoadedModel":
    """Load a language model: of a run, from a checkpoint or from an exported folder.

    >>> import fairseq_alma
    >>> model = fairseq_alma.load_model("run", arrival=0)
    >>> model.generate("And the", max_new_tokens=5).startswith("And the")
    True
    >>> sum(parameter.numel() for parameter in model.model.parameters()) < 100_000
    True

    Args:
        path: a run's folder, a checkpoint, or a folder that ``alma-export`` wrote.
        arrival: of a run: the mega-batch, from 0, after whose arrival the model is wanted; None: the newest.
        stream: whose tokenizer a checkpoint's model knows; None: the one that it was trained on.

    Raises:
        AlmaError: there is no such model, or its weights are not kept any more.
    """
    from fairseq_alma.exchange.load_model import load_model
    from fairseq_alma.runs.run_folder import RUN_RECORD

    path = Path(path)
    if (path / RUN_RECORD).is_file():
        path = _predictor(path, arrival)
    elif arrival is not None:
        raise AlmaError(f"{path}: no run, so there is no model at arrival {arrival}; give the folder of a run")
    return load_model(path, stream)


def score(model: "LoadedModel", texts: Iterable[str], window: int = 0, context: int = 0) -> "DataFrame":
    """Return the losses of documents, as ``alma-score`` prints them.

    >>> import fairseq_alma
    >>> model = fairseq_alma.load_model("run")
    >>> losses = fairseq_alma.score(model, ["And God said unto them", "xq zvxj qqkz wwpt jjxq"])
    >>> bool(losses.bits_per_byte[0] < losses.bits_per_byte[1])
    True

    Args:
        model: of `load_model`.
        texts: documents.
        window: tokens of a window; 0: as many as the model takes.
        context: tokens before each window that do not count.

    Returns:
        A row for each text; losses are in bits.
    """
    from pandas import DataFrame

    from fairseq_alma.exchange.load_model import score_texts

    return DataFrame([each.as_record() for each in score_texts(model, texts, window, context)])


def _predictor(path: Path, arrival: Optional[int]) -> Path:
    """Return the checkpoint that predicts after an arrival."""
    from fairseq_alma.runs.run_folder import RunFolder, stage_predictor

    run = RunFolder(path)
    records = [record for record in map(run.read_stage, run.stages()) if record is not None]
    if not records:
        raise AlmaError(f"{path}: no stage is complete yet; run alma-stream")
    reached = [max(record["megabatches"]) for record in records]
    known = range(min(reached), _num_known(run, max(reached)))
    if arrival is None:
        arrival = max(reached)
    if arrival not in known:
        there = f"arrival {known[0]}" if len(known) == 1 else f"arrivals {known[0]} to {known[-1]}"
        raise AlmaError(
            f"{path}: no model yet at arrival {arrival}, there is one at {there}; run alma-stream, or give one of these"
        )
    return stage_predictor(run, [record for record, last in zip(records, reached, strict=True) if last <= arrival][-1])


def _num_known(run: "RunFolder", last: int) -> int:
    """Return how many arrivals there are before the update after the last one that is complete, or in the stream.

    Args:
        run: the run.
        last: the mega-batch after whose arrival it was updated last.
    """
    from fairseq_alma.runs.study import planned_stages

    record = run.read_run()
    assert record is not None
    num_megabatches = max(record["stream"]["num_megabatches"], last + 1)
    ends = [stage.last_arrival for stage in planned_stages(record, num_megabatches)]
    return min((end for end in ends if end > last), default=num_megabatches)
