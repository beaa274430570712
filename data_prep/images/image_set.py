"""What a source of images gives: the images in the order of publication, those for the test last."""

from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

import numpy as np

from fairseq_alma.errors import AlmaError

_TEST_DRAW = 1  # beside the seed, so that the draw of the test images is another one than the deal of the rest


@dataclass(frozen=True)
class ImageSet:
    """A data set in memory.

    Attributes:
        dataset: name in the manifest.
        images: ``(num_images, C, H, W)``, uint8: the training images, then the test images.
        labels: ``(num_images,)``, whole numbers from 0 to ``num_classes - 1``.
        num_train: how many images are for training.
        num_classes: number of classes.
        augment: whether training crops and flips.
        remarks: what was done to the published images, for whoever gives the command.
    """

    dataset: str
    images: np.ndarray
    labels: np.ndarray
    num_train: int
    num_classes: int
    augment: bool = False
    remarks: tuple[str, ...] = ()


def check_pair(images: np.ndarray, labels: np.ndarray, images_path: Path, labels_path: Path) -> None:
    """Raise AlmaError unless there are images, and as many as labels."""
    if not len(images):
        raise AlmaError(f"{images_path}: no image in it; give a file with images")
    if len(images) != len(labels):
        raise AlmaError(
            f"{labels_path}: {len(labels)} labels found, {images_path} has {len(images)} images; fetch both"
        )


def check_labels(path: Path, labels: np.ndarray, num_classes: int, first_label: int = 0) -> None:
    """Raise AlmaError unless all labels are from ``first_label`` on, and of this many classes."""
    wrong = np.flatnonzero((labels < first_label) | (labels >= first_label + num_classes))
    if len(wrong):
        raise AlmaError(
            f"{path}: label {labels[wrong[0]]} found at image {wrong[0]}, {first_label} to "
            f"{first_label + num_classes - 1} is needed; fetch the file again, or give the one of this data set"
        )


def hold_out(num_images: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw a test set where none is published.

    Args:
        num_images: at least 2.
        fraction: share for the test.
        seed: decides the draw.

    Returns:
        Indices for training and for the test, each in ascending order; at least one image each.
    """
    num_test = min(max(round(fraction * num_images), 1), num_images - 1)
    generator = np.random.Generator(np.random.PCG64([seed, _TEST_DRAW]))
    chosen = np.zeros(num_images, dtype=bool)
    chosen[generator.permutation(num_images)[:num_test]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def with_test_held_out(
    dataset: str,
    images: np.ndarray,
    labels: np.ndarray,
    num_classes: int,
    fraction: float,
    seed: int,
    augment: bool = False,
    remarks: Sequence[str] = (),
) -> ImageSet:
    """Build the set of images that come without a test set; see `ImageSet` and `hold_out`."""
    train, test = hold_out(len(images), fraction, seed)
    order = np.concatenate([train, test])
    remark = f"no test set is published: {len(test):,} images are held out by seed {seed}"
    remarks = (*remarks, remark)
    return ImageSet(dataset, images[order], labels[order], len(train), num_classes, augment, remarks)
