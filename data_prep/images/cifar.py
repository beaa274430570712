"""CIFAR-10 and CIFAR-100 as published: the binary version, or the python version (Krizhevsky 2009).

Formats: https://www.cs.toronto.edu/~kriz/cifar.html. The python version is read without running what it holds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from data_prep.compression import read_plain_or_gz
from data_prep.images.array_pickle import read_array_pickle
from data_prep.images.image_set import ImageSet, check_labels, check_pair
from data_prep.images.input_files import InputFiles, advice, holds
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
