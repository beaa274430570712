"""Read and write a stream of images: arrays of images and labels, and the image indices of each split.

A memory-mapped array contains all images in the order of the published files. Each split is an array of image indices.
An image has the same index in all streams of a data set. This module does not import torch.
"""

import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence, Union

import numpy as np

from fairseq_alma.data.stream import (
    IMAGES,
    LABELS,
    MANIFEST,
    ImagesEntry,
    Split,
    Stream,
    StreamFile,
    split_name,
    write_manifest,
)
from fairseq_alma.errors import AlmaError, naming, refusing_damage

_MAGIC = b"\x93NUMPY"
_REMEDY = "prepare the stream again, or restore this file from a copy"
_DECIMALS = 6


def read_npy(path: Path, fault: str, remedy: str) -> np.ndarray:
    """Return the memory-mapped array in a ``.npy`` file.

    Raises:
        AlmaError: the file is not a ``.npy`` file, is truncated, or contains Python objects instead of numbers. The
            message begins with ``fault`` and ends with ``remedy``.
    """
    with refusing_damage(fault, remedy), open(path, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:  # The message of np.load would suggest unpickling the file.
            raise ValueError("expected a .npy signature")
        try:
            with warnings.catch_warnings(action="ignore"):
                return np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            if "Python objects" in str(error):
                raise ValueError("expected a numeric array, found Python objects") from error
            raise


@dataclass(frozen=True, eq=False)
class ImageStream(ImagesEntry):
    """An open stream of images: entry in the manifest, arrays, and image indices of each split."""

    stream: Stream
    images: np.ndarray = field(repr=False)  # ``(num_images, C, H, W)``, uint8, memory-mapped
    labels: np.ndarray = field(repr=False)  # ``(num_images,)``, int64, from 0 to ``num_classes - 1``
    _indices: Mapping[str, np.ndarray] = field(repr=False)

    @classmethod
    def open(cls, path: Union[str, Path]) -> "ImageStream":
        """Open a stream and check its files against the manifest: size, sha256, shape and range of values.

        Raises:
            AlmaError: the folder is not a stream of images, or a file is missing or damaged.
        """
        stream = Stream.open(path, "images")
        entry = stream.images
        assert entry is not None  # `Stream.open` checks this and the lists of files.
        stream.verify([split.name for split in stream.splits])
        int64 = np.dtype(np.int64)
        images = _load(stream.root, entry.files[0], np.dtype(np.uint8), (None, *entry.shape))
        return cls(
            **vars(entry),
            stream=stream,
            images=images,
            labels=_load(stream.root, entry.files[1], int64, (len(images),), entry.num_classes),
            _indices={
                split.name: _load(stream.root, split.files[0], int64, (split.num_images,), len(images))
                for split in stream.splits
            },
        )

    @property
    def has_photographs(self) -> bool:
        """Return whether the images have three channels and at least 16 x 16 pixels, like the photographs of CIFAR."""
        return self.shape[0] == 3 and min(self.shape[1:]) >= 16  # minimum for the pooling layers of a VGG

    def indices(self, part: str, megabatches: Optional[Sequence[int]] = None) -> np.ndarray:
        """Return the concatenated image indices (int64) of splits. Raises AlmaError if a mega-batch does not exist.

        Args:
            part: ``train`` or ``valid`` if ``megabatches`` is given, else ``valid`` or ``test``.
            megabatches: indices of mega-batches, in order of concatenation; None for the ``valid`` or ``test`` set.
        """
        names = [part] if megabatches is None else [split_name(t, part) for t in megabatches]
        return np.concatenate([np.empty(0, np.int64), *(self._indices[self.stream.split(name).name] for name in names)])


def _load(
    root: Path, file: StreamFile, dtype: np.dtype, shape: tuple[Optional[int], ...], end: Optional[int] = None
) -> np.ndarray:
    """Return the array in a file of the stream: memory-mapped, or in memory if ``end`` is given.

    Raises:
        AlmaError: the file is damaged, the array does not have ``dtype`` and ``shape`` (None allows any size), or a
            value is not from 0 to ``end - 1``.
    """
    path = root / file.path
    array = read_npy(path, f"{path}: damaged .npy file", _REMEDY)
    fits = array.ndim == len(shape) and all(need in (None, size) for need, size in zip(shape, array.shape, strict=True))
    if array.dtype != dtype or not fits:
        needed = ", ".join("any" if size is None else str(size) for size in shape)
        raise AlmaError(f"{path}: expected {dtype} ({needed}), found {array.dtype} {array.shape}; {_REMEDY}")
    if end is None:
        return array
    if len(array) and not 0 <= array.min() <= array.max() < end:
        raise AlmaError(
            f"{path}: expected numbers from 0 to {end - 1}, found {array.min()} to {array.max()}; {_REMEDY}"
        )
    return np.array(array)


@dataclass(frozen=True)
class ImageSet:
    """Image data set in memory.

    Attributes:
        dataset: name of the data set in the manifest.
        images: uint8 array ``(num_images, C, H, W)``: training images, then test images.
        labels: int64 array ``(num_images,)``, from 0 to ``num_classes - 1``.
        num_train: number of training images.
        num_classes: number of classes.
        augment: whether training uses random crops and flips.
        remarks: lines for the printed summary, such as changes to the images or labels.
    """

    dataset: str
    images: np.ndarray
    labels: np.ndarray
    num_train: int
    num_classes: int
    augment: bool = False
    remarks: tuple[str, ...] = ()


def write_image_stream(
    root: Path,
    data: ImageSet,
    num_megabatches: int,
    seed: int,
    valid_fraction: float = 0.1,
    history: Sequence[Mapping[str, Any]] = (),
) -> Stream:
    """Write a stream of images, and return the `Stream`.

    Args:
        root: folder of the stream; created if it does not exist.
        data: images and labels of the data set.
        num_megabatches: number of mega-batches B, each with ``num_train // B`` images. No split contains the remaining
            images.
        seed: random seed for assigning images to mega-batches, non-negative.
        valid_fraction: share of each mega-batch for validation, above 0 and below 1. Each mega-batch has at least one
            image for validation and one for training.
        history: records of the commands that made the stream; see `Stream`.

    Raises:
        AlmaError: B is too large for the number of images.
    """
    megabatches = assign_images(data.num_train, num_megabatches, seed, valid_fraction)
    files = _write(root, IMAGES, data.images), _write(root, LABELS, data.labels.astype("<i8"))
    named: dict[str, np.ndarray] = {}
    for number, (train, valid) in enumerate(megabatches):
        named |= {split_name(number): train, split_name(number, "valid"): valid}
    named["valid"] = np.concatenate([valid for _, valid in megabatches])
    named["test"] = np.arange(data.num_train, len(data.images))
    splits = [
        Split(name, (_write(root, f"{name}.npy", indices.astype("<i8")),), num_images=len(indices))
        for name, indices in named.items()
    ]
    mean, std = channel_statistics(data.images[: data.num_train])
    shape: Any = data.images.shape[1:]
    entry = ImagesEntry(data.dataset, shape, data.num_classes, mean, std, data.augment, files)
    stream = Stream(root, "images", seed, tuple(splits), images=entry, history=tuple(history))
    write_manifest(stream, root / MANIFEST)
    return stream


def assign_images(
    num_train: int, num_megabatches: int, seed: int, valid_fraction: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Assign training images at random to mega-batches of ``num_train // num_megabatches`` images.

    Returns:
        List with (training image indices, validation image indices) for each mega-batch, int64.

    Raises:
        AlmaError: a mega-batch would have fewer than two images.
    """
    size = num_train // num_megabatches
    if size < 2:
        remedy = f"at most {num_train // 2} mega-batches" if num_train > 1 else "more images"
        raise AlmaError(
            f"--megabatches {num_megabatches}: expected at least 2 images per mega-batch, found {size}; give {remedy}"
        )
    num_valid = min(max(round(valid_fraction * size), 1), size - 1)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(num_train)[: num_megabatches * size]
    return [(part[num_valid:], part[:num_valid]) for part in order.reshape(num_megabatches, size)]


def channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (means, standard deviations) of the channels of uint8 images ``(num_images, C, H, W)``.

    Pixels are scaled to [0, 1]. A standard deviation of 0 is replaced by 1. Sums of integers make results reproducible.
    """
    total, mean, std = images[:, 0].size, [], []
    sums = images.sum(axis=(0, 2, 3), dtype=np.int64)
    squares = np.einsum("nchw,nchw->c", images, images, dtype=np.int64)  # needs no memory for the squares
    for first, second in zip(sums.tolist(), squares.tolist(), strict=True):
        variance = (total * second - first * first) / (255 * total) ** 2
        mean.append(round(first / (255 * total), _DECIMALS))
        std.append(round(math.sqrt(variance), _DECIMALS) or 1.0)
    return tuple(mean), tuple(std)


def _write(root: Path, name: str, array: np.ndarray) -> StreamFile:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path):
        np.save(path, np.ascontiguousarray(array), allow_pickle=False)
    return StreamFile.describe(root, name)
