"""What a source of images reads, recorded by content, and gives: the images in the order of publication, test last."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Sequence

import numpy as np

from data_prep.build_folder import recorded_name
from fairseq_alma.data.stream import file_sha256
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


class InputFiles:
    """The files that one command reads.

    Attributes:
        records: name, size in bytes and sha256 of each file that was asked for, as the manifest records them.
    """

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def add(self, path: Path, flag: str) -> Path:
        """Record a file that a flag names and return it.

        Raises:
            AlmaError: it is not there.
        """
        if not path.is_file():
            found = "a folder" if path.is_dir() else "no regular file" if path.exists() else "no such file"
            raise AlmaError(f"{flag} {path}: {found}; give a file")
        self.records.append({"name": recorded_name(path), "size": path.stat().st_size, "sha256": file_sha256(path)})
        return path

    def find(self, source: Path, names: Sequence[str], folders: Sequence[str] = ()) -> list[Path]:
        """Record files of a folder and return their paths, in the order of the names.

        Args:
            source: the folder that ``--source`` names.
            names: of files that are all needed; each may also end in ``.gz``.
            folders: where archives put these files; looked into too.

        Raises:
            AlmaError: one is not there.
        """
        paths = []
        for name in names:
            path = _look_for(source, name, folders)
            if path is None:
                raise AlmaError(f"--source {source}: no {name} in it (nor {name}.gz); {advice(names, folders)}")
            paths.append(self.add(path, "--source"))
        return paths


def holds(source: Path, name: str, folders: Sequence[str]) -> bool:
    """Tell whether ``--source`` has a file of this name, see `InputFiles.find`.

    Raises:
        AlmaError: ``--source`` is no folder.
    """
    return _look_for(source, name, folders) is not None


def advice(names: Sequence[str], folders: Sequence[str]) -> str:
    """Say which files a folder must hold."""
    within = f", or that holds {folders[0]}/ with them" if folders else ""
    return f"give the folder that holds {', '.join(names)}{within}"


def _look_for(source: Path, name: str, folders: Sequence[str]) -> Optional[Path]:
    if not source.is_dir():
        found = "a file" if source.exists() else "no such folder"
        raise AlmaError(f"--source {source}: {found}; give the folder that holds the published files")
    for folder in (source, *(source / folder for folder in folders)):
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    return None
