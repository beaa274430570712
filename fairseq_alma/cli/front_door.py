"""The functions of a notebook; each imports what it needs (torch, fairseq, pandas) when it is called.

The examples are run as tests, in the folder that ``recipes/tour.py`` leaves behind.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Optional, Sequence, Union

if TYPE_CHECKING:
    from pandas import DataFrame

    from fairseq_alma.data.stream import Stream
    from fairseq_alma.text.loaded_model import LoadedModel

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
    >>> list(arrivals.index), list(arrivals.experts)
    ([0, 1], [2.0, 4.0])
    >>> bool(arrivals.value.iloc[1] < arrivals.value.iloc[0])  # test perplexity
    True

    Args:
        path: folder that ``alma-stream`` wrote; the run may still be going.

    Returns:
        Columns as `report.read_run.Run.arrivals`: ``value`` is the test perplexity, or for images the error.

    Raises:
        AlmaError: it is no run, or damaged.
    """
    from fairseq_alma.report import read_run as reader

    return reader.read_run(Path(path))


def load_model(path: AnyPath, arrival: Optional[int] = None, stream: Optional[AnyPath] = None) -> "LoadedModel":
    """Load a language model of a run, or of a checkpoint.

    >>> import fairseq_alma
    >>> model = fairseq_alma.load_model("run", arrival=0)
    >>> model.generate("And the", max_new_tokens=5).startswith("And the")
    True
    >>> sum(parameter.numel() for parameter in model.model.parameters()) < 100_000
    True

    Args:
        path: folder of a run, of a model with its run in it, or a checkpoint.
        arrival: of a run: the mega-batch, from 0, after whose arrival the model is wanted; None: the newest.
        stream: whose tokenizer the model knows; None: the one that it was trained on.

    Raises:
        AlmaError: there is no such model, or its weights are not kept any more.
    """
    from fairseq_alma.runs.lookup import find_model
    from fairseq_alma.text.loaded_model import load_model

    return load_model(find_model(Path(path), arrival), stream)


def score(model: "LoadedModel", texts: Union[str, Sequence[str]], window: int = 0, context: int = 0) -> "DataFrame":
    """Return the losses of documents.

    >>> import fairseq_alma
    >>> model = fairseq_alma.load_model("run")
    >>> losses = fairseq_alma.score(model, ["And God said unto them", "xq zvxj qqkz wwpt jjxq"])
    >>> bool(losses.bits_per_byte[0] < losses.bits_per_byte[1])
    True

    Args:
        model: of `load_model`.
        texts: documents; a ``str`` is one document.
        window: tokens of a window; 0: as many as the model takes.
        context: tokens before each window that do not count.

    Returns:
        A row for each text; losses are in bits.
    """
    from pandas import DataFrame

    columns = ("num_tokens", "num_bytes", "bits", "end_bits", "bits_per_token", "bits_per_byte")
    scores = model.score(texts, window, context)
    return DataFrame([{name: getattr(each, name) for name in columns} for each in scores], columns=columns)
