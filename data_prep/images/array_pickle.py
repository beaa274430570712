"""Read arrays out of a pickle without letting it run anything.

A pickle is a program: it may name any function of any module and call it. Here the few names that NumPy's arrays need
stand for the classes below, which do nothing but take note, and every other name is refused. NumPy's own functions are
not called either, as they trust what they are given: a forged type would make them take bytes for pointers.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.gzip_file import open_plain_or_gz
from fairseq_alma.errors import AlmaError

_TYPES = {"u1": "u1", "i8": "<i8", "i4": "<i4"}  # what is read, by the code that a pickle gives
_LITTLE_ENDIAN = (b"<", "<", b"|", "|")


class _Type:
    """Stands for ``numpy.dtype``."""

    def __init__(self, code: Any, align: Any = 0, copy: Any = 0) -> None:
        self.code = code.decode("latin1") if isinstance(code, bytes) else code

    def __setstate__(self, state: tuple) -> None:
        if self.code not in _TYPES or state[1] not in _LITTLE_ENDIAN or state[2:5] != (None, None, None):
            raise pickle.UnpicklingError(f"it has an array of type {self.code!r} {state!r}")


class _Array:
    """Stands for ``numpy.ndarray`` and the function that makes one."""

    def __init__(self, kind: Any, shape: Any, code: Any) -> None:
        self.array: Any = None

    def __setstate__(self, state: tuple) -> None:
        _, shape, type_, in_columns, content = state
        if not isinstance(type_, _Type) or not isinstance(content, bytes):
            raise pickle.UnpicklingError(f"it has an array of {type(content).__name__}")
        self.array = np.frombuffer(content, dtype=_TYPES[type_.code]).reshape(shape, order="F" if in_columns else "C")


_STANDS_FOR = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
}


class _ArrayUnpickler(pickle._Unpickler):
    """Knows the names above and no other.

    The one that is written in Python: in a damaged file the one in C takes four bytes for the size of a table and fills
    gigabytes. It is fast enough, as nearly all of such a file is one array.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for."""
        if (module, name) not in _STANDS_FOR:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _STANDS_FOR[module, name]


def read_array_pickle(path: Path) -> dict[str, Any]:
    """Read a pickled dictionary of arrays, lists, numbers and text, as Python 2 or 3 wrote it.

    Returns:
        The dictionary; keys are text.

    Raises:
        AlmaError: the file is no pickle, or holds anything else; nothing of it has been run.
    """
    with open_plain_or_gz(path) as file:
        pickled = io.BytesIO(file.read())
    try:
        content = _ArrayUnpickler(pickled, encoding="bytes").load()
    except Exception as error:  # a damaged pickle may raise whatever its wrong opcodes lead to
        raise AlmaError(
            f"{path}: no pickle of arrays and nothing else ({str(error) or type(error).__name__}), so it was not read; "
            "fetch the file again"
        ) from error
    if not isinstance(content, dict):
        raise AlmaError(
            f"{path}: a pickled {type(content).__name__} found, a dictionary is needed; fetch the file again"
        )
    texts = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in content.items()}
    return {
        key: value.array if isinstance(value, _Array) else value for key, value in texts.items() if isinstance(key, str)
    }
