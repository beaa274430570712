"""CIFAR-10 and CIFAR-100 as published: the binary version, or the python version (Krizhevsky 2009).

Formats: https://www.cs.toronto.edu/~kriz/cifar.html. The python version is read without running what it holds.
"""

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, ClassVar, Sequence

import numpy as np

from data_prep.compression import read_plain_or_gz
from data_prep.images.image_set import ImageSet, InputFiles, advice, check_labels, check_pair, holds
from fairseq_alma.errors import AlmaError

SHAPE = (3, 32, 32)
NUM_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class CifarLayout:
    """How one of the two data sets is published.

    Attributes:
        train: names of the training files in the python version; the binary one adds ``.bin``.
        test: name of the test file, likewise.
        folders: what the archives unpack to, binary and python.
        label_keys: per kind of label, in the order of the bytes before an image: the key in the pickle.
        num_classes: per kind of label.
    """

    train: tuple[str, ...]
    test: str
    folders: tuple[str, str]
    label_keys: dict[str, str]
    num_classes: dict[str, int]

    @property
    def python_names(self) -> list[str]:
        """The files of the python version, the test file last."""
        return [*self.train, self.test]

    @property
    def binary_names(self) -> list[str]:
        """The files of the binary version, the test file last."""
        return [f"{name}.bin" for name in self.python_names]


CIFAR10 = CifarLayout(
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test="test_batch",
    folders=("cifar-10-batches-bin", "cifar-10-batches-py"),
    label_keys={"fine": "labels"},
    num_classes={"fine": 10},
)
CIFAR100 = CifarLayout(
    train=("train",),
    test="test",
    folders=("cifar-100-binary", "cifar-100-python"),
    label_keys={"coarse": "coarse_labels", "fine": "fine_labels"},
    num_classes={"coarse": 20, "fine": 100},
)


def load_cifar(files: InputFiles, source: Path, dataset: str, layout: CifarLayout, labels: str = "fine") -> ImageSet:
    """Read a data set of this layout.

    Args:
        files: records what is read.
        source: folder of the files, or of the folder that the archive unpacks to.
        dataset: name in the manifest.
        layout: see `CifarLayout`.
        labels: which kind of label.

    Raises:
        AlmaError: a file is missing, of another size than its format allows, or holds what does not belong there.
    """
    parts, train_sizes = [], []
    binary = holds(source, layout.binary_names[0], layout.folders)
    if not binary and not holds(source, layout.python_names[0], layout.folders):
        raise AlmaError(
            f"--source {source}: neither the binary nor the python version of {dataset} in it; "
            f"{advice(layout.binary_names, layout.folders)}, or the same without .bin"
        )
    read = _read_binary if binary else _read_pickle
    for path in files.find(source, layout.binary_names if binary else layout.python_names, layout.folders):
        parts.append(read(path, layout, labels))
        check_labels(path, parts[-1][1], layout.num_classes[labels])
        train_sizes.append(len(parts[-1][1]))
    images = np.concatenate([pixels.reshape(-1, *SHAPE) for pixels, _ in parts])
    num_classes = layout.num_classes[labels]
    all_labels = np.concatenate([one for _, one in parts])
    return ImageSet(dataset, images, all_labels, sum(train_sizes[:-1]), num_classes, augment=True)


def _read_binary(path: Path, layout: CifarLayout, labels: str) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels ``(n, 3072)``, uint8, and labels ``(n,)``, int64, of records of label bytes and pixels."""
    kinds = list(layout.label_keys)
    record = len(kinds) + NUM_PIXELS
    content = read_plain_or_gz(path)
    if not content or len(content) % record:
        raise AlmaError(
            f"{path}: {len(content)} bytes found, a multiple of {record} is needed ({len(kinds)} for labels and "
            f"{NUM_PIXELS} for pixels per image); fetch the file again"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    return records[:, len(kinds) :], records[:, kinds.index(labels)].astype(np.int64)


def _read_pickle(path: Path, layout: CifarLayout, labels: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the same as `_read_binary` from a file of the python version."""
    content = read_array_pickle(path)
    key = layout.label_keys[labels]
    for needed in ("data", key):
        if needed not in content:
            raise AlmaError(
                f"{path}: no {needed!r} in it, {', '.join(content) or 'nothing'} found; fetch the file again"
            )
    pixels, numbers = content["data"], _whole_numbers(path, key, content[key])
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (NUM_PIXELS,):
        found = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise AlmaError(f"{path}: 'data' is {found}, uint8 (any, {NUM_PIXELS}) is needed; fetch the file again")
    check_pair(pixels, numbers, path, path)
    return pixels, numbers


def _whole_numbers(path: Path, key: str, numbers: Any) -> np.ndarray:
    """Return a list of labels as an array ``(n,)``, int64."""
    plain = isinstance(numbers, np.ndarray) or (
        isinstance(numbers, Sequence) and all(isinstance(number, int) for number in numbers)
    )
    array = np.asarray(numbers) if plain else np.empty(0)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise AlmaError(f"{path}: {key!r} is no list of whole numbers; fetch the file again")
    return array.astype(np.int64)


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
    """Knows the names above and no other, so that a pickle runs nothing.

    A pickle is a program: it may name any function of any module and call it. Here the few names that NumPy's arrays
    need stand for the classes above, which do nothing but take note. NumPy's own functions are not called either, as
    they trust what they are given: a forged type would make them take bytes for pointers.

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
