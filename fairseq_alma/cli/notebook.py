"""Functions for notebooks. Each function imports its dependencies (torch, fairseq, pandas) on its first call.

``recipes/tour.py`` writes a folder with a stream and runs. ``tests/recipes/test_tour.py`` runs the examples of the
docstrings in this folder.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Optional, Sequence, Union

if TYPE_CHECKING:
    from pandas import DataFrame

    from fairseq_alma.data.stream import Stream
    from fairseq_alma.text.loaded_model import LoadedModel

AnyPath = Union[str, Path]


def open_stream(path: AnyPath) -> "Stream":
    """Open a stream written by alma-prep-text or alma-prep-images. Raises AlmaError if it is missing or damaged.

    >>> import fairseq_alma
    >>> stream = fairseq_alma.open_stream("stream")
    >>> stream.num_megabatches, stream.kind
    (2, 'text')
    """
    from fairseq_alma.data.stream import Stream

    return Stream.open(path)


def read_run(path: AnyPath) -> "DataFrame":
    """Read the results of a complete or incomplete run. Raises AlmaError if the run is missing or damaged.

    >>> import fairseq_alma
    >>> arrivals = fairseq_alma.read_run("run")
    >>> list(arrivals.index), list(arrivals.experts)
    ([0, 1], [2.0, 4.0])
    >>> bool(arrivals.value.iloc[1] < arrivals.value.iloc[0])  # test perplexity
    True

    Returns:
        DataFrame with one row for each arrival and the columns of `report.read_run.RecordedRun.arrivals`; ``value`` is
        the test perplexity (text) or the test error from 0 to 1 (images).
    """
    from fairseq_alma.report.read_run import load_run

    return load_run(Path(path)).arrivals


def load_model(path: AnyPath, arrival: Optional[int] = None, stream: Optional[AnyPath] = None) -> "LoadedModel":
    """Load a language model. Raises AlmaError if the weights are missing.

    >>> import fairseq_alma
    >>> model = fairseq_alma.load_model("run", arrival=0)
    >>> model.generate("And the", max_new_tokens=5).startswith("And the")
    True
    >>> sum(parameter.numel() for parameter in model.model.parameters()) < 100_000
    True

    Args:
        path: run folder, folder of ``alma-update``, or checkpoint file.
        arrival: index (numbered from 0) of the arrival whose model is loaded; None for the newest model.
        stream: stream with the tokenizer of the model; None for the training stream of the model.
    """
    from fairseq_alma.runs.lookup import find_model
    from fairseq_alma.text.loaded_model import load_model

    return load_model(find_model(Path(path), arrival), stream)


def score(model: "LoadedModel", texts: Union[str, Sequence[str]]) -> "DataFrame":
    """Compute the loss of each document in bits; a ``str`` is one document.

    >>> import fairseq_alma
    >>> model = fairseq_alma.load_model("run")
    >>> losses = fairseq_alma.score(model, ["And God said unto them", "xq zvxj qqkz wwpt jjxq"])
    >>> bool(losses.bits_per_byte[0] < losses.bits_per_byte[1])
    True

    Args:
        model: model returned by `load_model`.
        texts: one document or several documents.

    Returns:
        DataFrame with one row for each document and the columns of `text.loaded_model.Score`.
    """
    from pandas import DataFrame

    columns = ("num_tokens", "num_bytes", "bits", "end_bits", "bits_per_token", "bits_per_byte")
    return DataFrame([[getattr(each, name) for name in columns] for each in model.score(texts)], columns=columns)
