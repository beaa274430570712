"""Read arrays out of a pickle without letting it run anything.

A pickle is a program: it may name any function of any module and call it. Here the few names that NumPy's arrays need
stand for the classes below, which do nothing but take note, and every other name is refused. NumPy's own functions are
not called either, as they trust what they are given: a forged type would make them take bytes for pointers.
"""

import io
import pickle
from pathlib import Path
from typing import Any, Callable, ClassVar

import numpy as np

from data_prep.compression import read_plain_or_gz
from fairseq_alma.errors import AlmaError

_TYPES = {"u1": "u1", "i8": "<i8", "i4": "<i4"}  # what is read, by the code that a pickle gives
_LITTLE_ENDIAN = (b"<", "<", b"|", "|")


class _Type:
    """Stands for ``numpy.dtype``."""

    def __init__(self, code: Any, align: Any = 0, copy: Any = 0) -> None:
        self.code = code.decode("latin1") if isinstance(code, bytes) else code

    def __setstate__(self, state: tuple) -> None:
        # Compared and shown only where it is short: tuples of the same two tuples, and so on, never end in print.
        if not isinstance(self.code, str):
            raise pickle.UnpicklingError(f"it has an array of a type that is a {type(self.code).__name__}")
        if self.code not in _TYPES or state[1] not in _LITTLE_ENDIAN or state[2:5] != (None, None, None):
            raise pickle.UnpicklingError(f"it has an array of type {self.code!r:.20}, or in another order of bytes")


class _Array:
    """Stands for ``numpy.ndarray`` and the function that makes one."""

    def __init__(self, kind: Any, shape: Any, code: Any) -> None:
        self.array: Any = None

    def __setstate__(self, state: tuple) -> None:
        _, shape, type_, in_columns, content = state
        if not isinstance(type_, _Type) or not isinstance(content, bytes):
            raise pickle.UnpicklingError(f"it has an array of {type(content).__name__}")
        self.array = np.frombuffer(content, dtype=_TYPES[type_.code]).reshape(shape, order="F" if in_columns else "C")


_FILLS_DICTIONARY = {code[0] for code in (pickle.SETITEM, pickle.SETITEMS, pickle.DICT)}
_FILLS_SET = {code[0] for code in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET)}
_STANDS_FOR = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
}


def _refuse_odd_keys(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Let a step that fills dictionaries refuse keys beside text and numbers: to hash nested tuples may never end."""

    def checked(unpickler: Any) -> None:
        keys = unpickler.stack[-2:-1] if load is pickle._Unpickler.load_setitem else unpickler.stack[::2]  # type: ignore
        if not all(isinstance(key, (str, bytes, int)) for key in keys):
            raise pickle.UnpicklingError("it has a dictionary with keys beside text and numbers")
        load(unpickler)

    return checked


class _ArrayUnpickler(pickle._Unpickler):
    """Knows the names above and no other.

    The one that is written in Python: in a damaged file the one in C takes four bytes for the size of a table and fills
    gigabytes. It is fast enough, as nearly all of such a file is one array.
    """

    dispatch: ClassVar = {
        code: _refuse_odd_keys(load) if code in _FILLS_DICTIONARY else load
        for code, load in pickle._Unpickler.dispatch.items()
        if code not in _FILLS_SET
    }

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
    pickled = io.BytesIO(read_plain_or_gz(path))
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
