"""Read ``.npy`` files of anybody: nothing is unpickled, and what a header announces costs no memory in advance."""

import warnings
from pathlib import Path

import numpy as np

_MAGIC = b"\x93NUMPY"


def read_npy(path: Path) -> np.ndarray:
    """Return the array in a ``.npy`` file, mapped: it stays on the disk until it is used.

    Raises:
        ValueError: the file is no ``.npy`` file of numbers, or shorter than its header says.
    """
    with open(path, "rb") as file:
        start = file.read(len(_MAGIC))
    if start != _MAGIC:  # else NumPy takes it for a pickle, and advises to trust it
        raise ValueError("it does not begin as one")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # of whatever kind a damaged header leads NumPy and Python's parser to
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            "Python objects found, Object arrays are not read" if "Python objects" in reason else reason
        ) from error
