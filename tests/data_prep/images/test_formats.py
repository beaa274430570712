"""Image formats: the arrays that the loaders return, and the files that they refuse."""

from argparse import Namespace

import numpy as np
import pytest

from data_prep.images import InputFiles, emnist_names, load_arrays, load_cifar, load_digits, load_idx, read_idx
from fairseq_alma.errors import AlmaError
from tests.data_prep.images.published import idx_bytes, random_images, write, write_cifar, write_mnist


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx_bytes(np.zeros(9)), "expected an idx file of bytes with 3 dimensions.* found 00 00 08 01"),
        (idx_bytes(np.zeros((2, 3, 4)))[:-1], "expected 2 x 3 x 4 = 24 bytes of data, found 23;"),
    ],
)
def test_a_damaged_idx_file_is_refused(tmp_path, content, message):
    path = write(tmp_path / "a-idx3-ubyte", content)
    with pytest.raises(AlmaError, match=f"a-idx3-ubyte.*: .*{message}.*download the file again"):
        read_idx(path, 3)


def test_a_missing_file_is_named_with_all_required_files(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    missing = r"expected t10k-labels-idx1-ubyte or .*\.gz in this folder, found neither; give the folder that contains"
    with pytest.raises(AlmaError, match=missing):
        load_idx(InputFiles(), tmp_path, "mnist", "")
    with pytest.raises(AlmaError, match=r"--source .*nowhere: expected train-images-idx3-ubyte or"):
        load_idx(InputFiles(), tmp_path / "nowhere", "mnist", "")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (None, np.arange(40) % 11, "train-labels-idx1-ubyte: expected labels from 0 to 9, found 10 at image 10"),
        (None, [0] * 41, r"expected one label for each of the 40 images in .*train-images-idx3-ubyte, found 41 labels"),
        (np.zeros((3, 28, 27)), np.zeros(3), "expected images of 28 x 28 pixels, found 28 x 27"),
        (np.zeros((0, 28, 28)), np.zeros(0), "at least 1 image"),
    ],
)
def test_files_that_do_not_fit_together_are_named(tmp_path, images, labels, message):
    write_mnist(tmp_path, packed=False)
    if images is not None:
        write(tmp_path / "train-images-idx3-ubyte", idx_bytes(images))
    write(tmp_path / "train-labels-idx1-ubyte", idx_bytes(np.array(labels)))
    with pytest.raises(AlmaError, match=message):
        load_idx(InputFiles(), tmp_path, "mnist", "")


@pytest.mark.parametrize("folder", [".", "gzip"])
def test_emnist_images_are_transposed(tmp_path, folder):
    images, labels = write_mnist(tmp_path / folder, num_classes=47, num_train=60, names=tuple(emnist_names("balanced")))
    read = load_idx(InputFiles(), tmp_path, "emnist", "balanced")
    assert np.array_equal(read.images[:, 0].swapaxes(1, 2), images)
    assert not np.array_equal(read.images[:, 0], images)
    assert np.array_equal(read.labels, labels)
    assert (read.dataset, read.num_classes) == ("emnist-balanced", 47)
    assert "transposed" in read.remarks[0]


def test_labels_of_emnist_letters_start_at_zero(tmp_path):
    names = tuple(emnist_names("letters"))
    _, labels = write_mnist(tmp_path, num_classes=26, first_label=1, names=names)
    assert (labels.min(), labels.max()) == (1, 26)
    assert np.array_equal(load_idx(InputFiles(), tmp_path, "emnist", "letters").labels, labels - 1)
    write_mnist(tmp_path, num_classes=26, first_label=0, names=names)
    with pytest.raises(AlmaError, match="expected labels from 1 to 26, found 0 at image 0"):
        load_idx(InputFiles(), tmp_path, "emnist", "letters")


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin"])
def test_cifar10_keeps_the_order_of_publication(tmp_path, folder):
    images, labels = write_cifar(tmp_path / folder, "cifar10")
    read = load_cifar(InputFiles(), tmp_path, "cifar10")
    assert np.array_equal(read.images, images) and np.array_equal(read.labels, labels)
    assert (read.num_train, read.num_classes, read.augment) == (40, 10, True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(3072), "expected a multiple of 3073 bytes .*, found 3072 bytes;"),
        (b"\x0b" + bytes(3072), "found 11 at image 0"),
    ],
)
def test_damaged_files_of_cifar_are_named(tmp_path, content, message):
    write_cifar(tmp_path, "cifar10")
    write(tmp_path / "data_batch_3.bin", content)
    with pytest.raises(AlmaError, match=rf"data_batch_3\.bin: .*{message}"):
        load_cifar(InputFiles(), tmp_path, "cifar10")


def arrays(folder, images, labels, **options):
    np.save(folder / "x.npy", images)
    np.save(folder / "y.npy", labels)
    given = {"test_images": None, "test_labels": None, "channels": "first", "num_classes": None, "augment": False}
    given |= {"name": "arrays", "test_fraction": 0.2, "seed": 1, "images": folder / "x.npy", "labels": folder / "y.npy"}
    return load_arrays(InputFiles(), Namespace(**{**given, **options}))


@pytest.mark.parametrize(("shape", "options"), [((6, 7), {}), ((3, 6, 7), {}), ((6, 7, 3), {"channels": "last"})])
def test_arrays_with_and_without_channels_are_read(tmp_path, shape, options):
    read = arrays(tmp_path, random_images(20, *shape), np.arange(20) % 4, **options)
    assert read.images.shape == (20, 1 if len(shape) == 2 else 3, 6, 7) and read.num_classes == 4
    assert arrays(tmp_path, random_images(20, 6, 7), np.arange(20) % 4, num_classes=9).num_classes == 9


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((9, 6, 7)), np.zeros(9, int), r"expected a non-empty uint8 array .* found float64 \(9, 6, 7\)"),
        (random_images(9, 6, 7), np.zeros(9), r"expected one integer per image, found float64 \(9,\)"),
        (random_images(9, 6, 7, 3), np.zeros(9, int), "expected at most 4 channels, found 6; .*give --channels last"),
        (random_images(1, 6, 7), np.zeros(1, int), "expected at least 2 images, found 1;"),
        (np.array([{}] * 9, dtype=object), np.zeros(9, int), "expected a numeric array, found Python objects"),
    ],
)
def test_other_arrays_are_refused(tmp_path, images, labels, message):
    with pytest.raises(AlmaError, match=message):
        arrays(tmp_path, images, labels)


def test_digits_are_scaled_so_that_white_is_255(tmp_path):
    rows = np.column_stack([np.arange(64 * 5).reshape(5, 64) % 17, np.arange(5)])
    np.savetxt(tmp_path / "digits.csv", rows, delimiter=",", fmt="%d")
    read = load_digits(InputFiles(), Namespace(source=tmp_path, test_fraction=0.4, seed=1))
    assert (read.num_train, read.images.shape, read.images.min(), read.images.max()) == (3, (5, 1, 8, 8), 0, 255)


@pytest.mark.parametrize("content", ["a,b", "1,2\n3,4", f"{'1,' * 64}0\n{'17,' * 64}1"])
def test_a_table_of_digits_with_other_content_is_refused(tmp_path, content):
    (tmp_path / "digits.csv").write_text(content)
    with pytest.raises(AlmaError, match=r"not a table of integers|64 pixels from 0 to 16, found"):
        load_digits(InputFiles(), Namespace(source=tmp_path, test_fraction=0.4, seed=1))
