"""The idx files of MNIST and its kin: a magic number, the sizes of the dimensions, then bytes.

Format: http://yann.lecun.com/exdb/mnist/. EMNIST (Cohen et al. 2017) uses it with rows and columns exchanged.
"""

import math
import struct
from pathlib import Path

import numpy as np

from data_prep.compression import open_plain_or_gz, read_at_most
from data_prep.images.image_set import ImageSet, InputFiles, check_labels, check_pair
from fairseq_alma.errors import AlmaError

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
    header_format = struct.Struct(f">{1 + num_dimensions}I")
    with open_plain_or_gz(path) as file:
        header = file.read(header_format.size)
        magic = struct.pack(">HBB", 0, _UNSIGNED_BYTES, num_dimensions)
        if len(header) < header_format.size or not header.startswith(magic):
            raise AlmaError(
                f"{path}: begins with {header[:4].hex(' ') or 'nothing'}, an idx file of bytes in {num_dimensions} "
                f"dimensions begins with {magic.hex(' ')}; fetch the file again"
            )
        sizes = header_format.unpack(header)[1:]
        needed = math.prod(sizes)
        content = read_at_most(file, min(needed, _LARGEST) + 1)
    if len(content) != needed:
        found = f"{len(content)}" if len(content) < needed else "more"
        says = " x ".join(map(str, sizes))
        raise AlmaError(f"{path}: header says {says} = {needed} bytes, {found} found; fetch the file again")
    return np.frombuffer(content, dtype=np.uint8).reshape(sizes)


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
