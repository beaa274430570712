"""A stream of images as a learner reads it: the arrays, and which of them a mega-batch consists of.

NumPy only; the images stay on the disk until they are asked for.
"""

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Mapping, Optional, Sequence, Union

import numpy as np

from fairseq_alma.data.manifest import MANIFEST, ImagesEntry, StreamFile
from fairseq_alma.data.stream import Stream, megabatch_valid_name
from fairseq_alma.errors import AlmaError

_MAGIC = b"\x93NUMPY"


def read_npy(path: Path) -> np.ndarray:
    """Return the array in a ``.npy`` file of anybody, mapped: it stays on the disk until it is used.

    Nothing is unpickled, and what a header announces costs no memory in advance.

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


_SMALLEST_PHOTOGRAPH = 16  # pixels a side; less would leave nothing after the poolings of a VGG
_REMEDY = "prepare the stream again, or copy this file again from where it is whole"


@dataclass(frozen=True, eq=False)
class ImageStream:
    """The images of a stream.

    Attributes:
        stream: the manifest.
        images: ``(num_images, C, H, W)``, uint8, memory-mapped.
        labels: ``(num_images,)``, int64, from 0 to ``num_classes - 1``.
    """

    stream: Stream
    images: np.ndarray = field(repr=False)
    labels: np.ndarray = field(repr=False)
    _entry: ImagesEntry = field(repr=False)
    _indices: Mapping[str, np.ndarray] = field(repr=False)

    @classmethod
    def open(cls, path: Union[str, Path]) -> "ImageStream":
        """Open a stream and hold its arrays against the manifest: sizes, shapes, ranges, and the sha256 of each file.

        That reads everything once, as the task of a stream of text does: 0.1 s for CIFAR's 184 MB.

        Raises:
            AlmaError: no stream of images is there, or a file is missing or damaged.
        """
        stream = Stream.open(path)
        if stream.kind != "images":
            raise AlmaError(f"{path}: a stream of {stream.kind}; images need one made by alma-prep-images")
        entry = stream.images
        assert entry is not None  # `Stream.open` has seen to it, and to the lists of files
        images = _load(stream.root, entry.files[0], np.dtype(np.uint8), (None, *entry.shape))
        labels = np.array(_load(stream.root, entry.files[1], np.dtype(np.int64), (len(images),)))
        _check_range(stream.root, entry.files[1], labels, entry.num_classes)
        indices = {}
        for split in stream.splits:
            array = np.array(_load(stream.root, split.files[0], np.dtype(np.int64), (split.num_images,)))
            _check_range(stream.root, split.files[0], array, len(images))
            indices[split.name] = array
        stream.verify([split.name for split in stream.splits])
        return cls(stream, images, labels, entry, indices)

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(C, H, W)`` of one image."""
        return self._entry.shape

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self._entry.num_classes

    @property
    def mean(self) -> tuple[float, ...]:
        """Per channel, of the published training images, in units 0 to 1."""
        return self._entry.mean

    @property
    def std(self) -> tuple[float, ...]:
        """Per channel, as `mean`."""
        return self._entry.std

    @property
    def augment(self) -> bool:
        """Whether training crops and flips at random."""
        return self._entry.augment

    @property
    def has_photographs(self) -> bool:
        """Whether the images are photographs as CIFAR's rather than digits: three channels, 16 x 16 pixels or more."""
        return self.shape[0] == 3 and min(self.shape[1:]) >= _SMALLEST_PHOTOGRAPH

    @property
    def dataset(self) -> str:
        """What the images are, such as ``mnist``."""
        return self._entry.dataset

    @property
    def num_megabatches(self) -> int:
        """Number of mega-batches B."""
        return self.stream.num_megabatches

    def train_indices(self, megabatches: Sequence[int]) -> np.ndarray:
        """Return the indices of some mega-batches' training images, one mega-batch after the other, int64.

        Raises:
            AlmaError: there is no such mega-batch.
        """
        return self._concatenate([self.stream.megabatch(t).name for t in megabatches])

    def valid_indices(self, megabatches: Sequence[int]) -> np.ndarray:
        """Return the indices of some mega-batches' validation images, as `train_indices`."""
        for megabatch in megabatches:
            self.stream.megabatch(megabatch)  # refuses a number out of range
        return self._concatenate([megabatch_valid_name(t) for t in megabatches])

    def test_indices(self) -> np.ndarray:
        """Return the indices of the test images, int64."""
        return self._indices["test"]

    def _concatenate(self, names: Sequence[str]) -> np.ndarray:
        return np.concatenate([np.empty(0, np.int64), *(self._indices[name] for name in names)])


def _load(root: Path, file: StreamFile, dtype: np.dtype, shape: tuple[Optional[int], ...]) -> np.ndarray:
    """Return the array in a file of the stream, mapped.

    Args:
        root: the stream's folder.
        file: the manifest's entry.
        dtype: type that it must have.
        shape: shape that it must have; None where any number will do.
    """
    path = root / file.path
    if not path.is_file():
        raise AlmaError(f"{path}: no such file, but {MANIFEST} lists it; {_REMEDY}")
    if path.stat().st_size != file.size:
        raise AlmaError(f"{path}: {path.stat().st_size} bytes found, {MANIFEST} says {file.size}; {_REMEDY}")
    try:
        array = read_npy(path)
    except ValueError as error:
        raise AlmaError(f"{path}: damaged, no .npy file ({error}); {_REMEDY}") from error
    fits = array.ndim == len(shape) and all(need in (None, size) for need, size in zip(shape, array.shape, strict=True))
    if array.dtype != dtype or not fits:
        needed = ", ".join("any" if size is None else str(size) for size in shape)
        raise AlmaError(f"{path}: {array.dtype} {array.shape} found, {dtype} ({needed}) is needed; {_REMEDY}")
    return array


def _check_range(root: Path, file: StreamFile, array: np.ndarray, end: int) -> None:
    """Raise AlmaError unless all numbers are from 0 to ``end - 1``."""
    if len(array) and not 0 <= array.min() <= array.max() < end:
        raise AlmaError(
            f"{root / file.path}: numbers from {array.min()} to {array.max()} found, 0 to {end - 1} is needed; "
            f"{_REMEDY}"
        )
