"""Images and labels of one's own: a pair of ``.npy`` files, and a pair for the test or a share of the first."""

import zipfile
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Optional

import numpy as np

from data_prep.images.image_set import ImageSet, InputFiles, check_labels, check_pair, with_test_held_out
from fairseq_alma.data.image_stream import read_npy
from fairseq_alma.errors import AlmaError
from fairseq_alma.options import Options, opt, whole

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
    images, labels = _read_pair(files, given, given.images, given.labels, "")
    if given.test_images is None or given.test_labels is None:
        assert fraction is not None  # one of the two is given, see `parse_options`
        if len(images) < 2:
            raise AlmaError(f"--images {given.images}: one image found, at least 2 are needed; give more")
        num_classes = _num_classes(given, labels)
        return with_test_held_out(dataset, images, labels, num_classes, fraction, seed, given.augment)
    test_images, test_labels = _read_pair(files, given, given.test_images, given.test_labels, "test-")
    if test_images.shape[1:] != images.shape[1:]:
        raise AlmaError(
            f"--test-images {given.test_images}: images of {test_images.shape[1:]} found, those of --images are "
            f"{images.shape[1:]}; give arrays of one size"
        )
    both = np.concatenate([labels, test_labels])
    num_classes = _num_classes(given, both)
    return ImageSet(dataset, np.concatenate([images, test_images]), both, len(images), num_classes, given.augment)


def _read_pair(
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
