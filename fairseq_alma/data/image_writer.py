"""Deal images into mega-batches and write them as a stream.

The images stay in the order in which they were published, in one array; mega-batches, validation and test set are
lists of indices. So a stream takes one copy of its data set, and an
image can be followed through streams of other seeds and other B by its number.
"""

import math
from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np

from fairseq_alma.data.manifest import IMAGES, LABELS, MANIFEST, ImagesEntry, Split, StreamFile
from fairseq_alma.data.stream import Stream, megabatch_name, megabatch_valid_name, write_manifest
from fairseq_alma.errors import AlmaError, naming

_WHOLE_NUMBERS = np.dtype("<i8")
_ROWS_AT_ONCE = 10_000
_DECIMALS = 6


def write_image_stream(
    root: Path,
    images: np.ndarray,
    labels: np.ndarray,
    num_train: int,
    dataset: str,
    num_classes: int,
    num_megabatches: int,
    seed: int,
    valid_fraction: float = 0.1,
    augment: bool = False,
    history: Sequence[Mapping[str, Any]] = (),
) -> Stream:
    """Write a stream of images.

    Args:
        root: the stream's folder; made if it is not there.
        images: ``(num_images, C, H, W)``, uint8: the training images, then the test images.
        labels: ``(num_images,)``, whole numbers from 0 to ``num_classes - 1``.
        num_train: how many images are for training.
        dataset: what they are, such as ``mnist``.
        num_classes: number of classes.
        num_megabatches: B; each gets ``num_train // B`` images, what is left over gets into none.
        seed: decides which image goes where, from 0.
        valid_fraction: share of each mega-batch that is kept for its validation, above 0 and below 1; one image at
            least, and one at least remains for training.
        augment: whether training crops and flips.
        history: see `Stream`.

    Returns:
        The stream.

    Raises:
        AlmaError: B is larger than the images allow.
        ValueError: the arrays do not fit together.
    """
    _check_arrays(images, labels, num_train, num_classes)
    megabatches = deal_images(num_train, num_megabatches, seed, valid_fraction)
    root.mkdir(parents=True, exist_ok=True)
    _save(root / IMAGES, images)
    _save(root / LABELS, labels.astype(_WHOLE_NUMBERS))
    splits = []
    for number, (train, valid) in enumerate(megabatches):
        splits += [_write_split(root, megabatch_name(number), train)]
        splits += [_write_split(root, megabatch_valid_name(number), valid)]
    splits += [_write_split(root, "valid", np.concatenate([valid for _, valid in megabatches]))]
    splits += [_write_split(root, "test", np.arange(num_train, len(images)))]
    mean, std = channel_statistics(images[:num_train])
    files = tuple(StreamFile.describe(root, name) for name in (IMAGES, LABELS))
    _, channels, height, width = images.shape
    entry = ImagesEntry(dataset, (channels, height, width), num_classes, mean, std, augment, files)
    stream = Stream(root, "images", seed, tuple(splits), images=entry, history=tuple(history))
    write_manifest(stream, root / MANIFEST)
    return stream


def deal_images(
    num_train: int, num_megabatches: int, seed: int, valid_fraction: float
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Deal the training images into mega-batches of equal size.

    Returns:
        Per mega-batch the indices of its training images and of its validation images, int64.

    Raises:
        AlmaError: a mega-batch would have less than two images.
    """
    size = num_train // num_megabatches
    if size < 2:
        remedy = f"at most {num_train // 2}" if num_train > 1 else "more images"
        raise AlmaError(
            f"--megabatches {num_megabatches}: {num_train} training images give {size} per mega-batch, 2 are needed "
            f"(one to train, one to validate); give {remedy}"
        )
    num_valid = min(max(round(valid_fraction * size), 1), size - 1)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(num_train)
    parts = order[: num_megabatches * size].reshape(num_megabatches, size)
    return [(part[num_valid:], part[:num_valid]) for part in parts]


def channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel in units 0 to 1, from whole numbers, so equal anywhere.

    Args:
        images: ``(num_images, C, H, W)``, uint8.
    """
    num_channels = images.shape[1]
    counts = np.zeros((num_channels, 256), dtype=np.int64)  # how often each channel has each value
    for start in range(0, len(images), _ROWS_AT_ONCE):
        for channel in range(num_channels):
            counts[channel] += np.bincount(images[start : start + _ROWS_AT_ONCE, channel].reshape(-1), minlength=256)
    mean, std = [], []
    for row in counts:
        total, first = int(row.sum()), int(row @ np.arange(256))
        second = int(row @ np.arange(256) ** 2)
        variance = (total * second - first * first) / (255 * total) ** 2
        mean.append(round(first / (255 * total), _DECIMALS))
        std.append(round(math.sqrt(variance), _DECIMALS) or 1.0)
    return tuple(mean), tuple(std)


def _check_arrays(images: np.ndarray, labels: np.ndarray, num_train: int, num_classes: int) -> None:
    """Refuse arrays that do not fit together; a fault of the caller, who has read them."""
    if images.ndim != 4 or images.dtype != np.uint8:
        raise ValueError(f"images: {images.dtype} {images.shape} found, uint8 (num_images, C, H, W) is needed")
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise ValueError(f"labels: {labels.dtype} {labels.shape} found, whole numbers ({len(images)},) are needed")
    if not 0 < num_train < len(images):
        raise ValueError(
            f"num_train: {num_train} found, from 1 to {len(images) - 1} is needed, the rest is for the test"
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(f"labels: {labels.min()} to {labels.max()} found, 0 to {num_classes - 1} is needed")


def _write_split(root: Path, name: str, indices: np.ndarray) -> Split:
    path = f"{name}.npy"
    (root / path).parent.mkdir(exist_ok=True)
    _save(root / path, indices.astype(_WHOLE_NUMBERS))
    return Split(name, (StreamFile.describe(root, path),), num_images=len(indices))


def _save(path: Path, array: np.ndarray) -> None:
    """Write an array, in C order so that equal arrays are equal files."""
    with naming(path):
        np.save(path, np.ascontiguousarray(array), allow_pickle=False)
