"""idx files: what is read, and what a damaged one answers."""

import struct

import numpy as np
import pytest

from data_prep.images.formats import emnist_names, load_emnist, load_mnist, read_idx
from data_prep.images.image_set import InputFiles
from fairseq_alma.errors import AlmaError
from tests.data_prep.images.published import idx_bytes, random_images, write, write_mnist


@pytest.mark.parametrize("packed", [False, True])
def test_idx_file_is_read_plain_and_packed(tmp_path, packed):
    array = random_images(5, 4, 3)
    path = write(tmp_path / "a-idx3-ubyte", idx_bytes(array), packed)
    assert np.array_equal(read_idx(path, 3), array)


def test_packed_file_is_told_by_its_content(tmp_path):
    array = random_images(5, 4, 3)
    path = write(tmp_path / "a", idx_bytes(array), packed=True).rename(tmp_path / "a-idx3-ubyte")
    assert np.array_equal(read_idx(path, 3), array)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing, an idx file of bytes in 3 dimensions begins with 00 00 08 03"),
        (b"<html>not found</html>", "begins with 3c 68 74 6d, an idx file"),
        (idx_bytes(np.zeros(9)), "begins with 00 00 08 01, an idx file of bytes in 3 dimensions"),
        (struct.pack(">HBB3I", 0, 13, 3, 1, 1, 1) + bytes(4), "begins with 00 00 0d 03"),
        (idx_bytes(np.zeros((2, 3, 4)))[:-1], "header says 2 x 3 x 4 = 24 bytes, 23 found"),
        (idx_bytes(np.zeros((2, 3, 4))) + b"x", "header says 2 x 3 x 4 = 24 bytes, more found"),
        (struct.pack(">HBB3I", 0, 8, 3, *[2**32 - 1] * 3) + bytes(9), r"= \d{29} bytes, 9 found"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_file_that_is_no_idx_or_of_another_size_is_refused(tmp_path, content, message, packed):
    path = write(tmp_path / "a-idx3-ubyte", content, packed)
    with pytest.raises(AlmaError, match=f"a-idx3-ubyte.*: .*{message}.*fetch the file again"):
        read_idx(path, 3)


@pytest.mark.parametrize("damage", [lambda content: content[:-20], lambda content: content[:-8] + bytes(8)])
def test_broken_gzip_is_refused(tmp_path, damage):
    path = write(tmp_path / "a-idx3-ubyte", idx_bytes(random_images(50, 28, 28)), packed=True)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(AlmaError, match="broken gzip data"):
        read_idx(path, 3)


def test_mnist_comes_in_the_order_of_publication_with_the_test_images_last(tmp_path):
    images, labels = write_mnist(tmp_path)
    files = InputFiles()
    read = load_mnist(files, tmp_path, "mnist")
    assert np.array_equal(read.images[:, 0], images)
    assert np.array_equal(read.labels, labels)
    assert (read.num_train, read.num_classes, read.augment) == (40, 10, False)
    assert [record["name"] for record in files.records][::3] == [
        "train-images-idx3-ubyte.gz",
        "t10k-labels-idx1-ubyte.gz",
    ]


def test_missing_file_is_named_with_all_that_are_needed(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(AlmaError, match=r"no t10k-labels-idx1-ubyte in it \(nor .*\.gz\); give the folder that holds"):
        load_mnist(InputFiles(), tmp_path, "mnist")


@pytest.mark.parametrize("source", ["nowhere", "file"])
def test_source_that_is_no_folder_is_refused(tmp_path, source):
    (tmp_path / "file").write_text("")
    with pytest.raises(AlmaError, match=rf"--source .*{source}: (no such folder|a file); give the folder"):
        load_mnist(InputFiles(), tmp_path / source, "mnist")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (None, np.arange(40) % 11, "train-labels-idx1-ubyte: label 10 found at image 10, 0 to 9 is needed"),
        (None, np.zeros(41), r"41 labels found, .*train-images-idx3-ubyte has 40 images"),
        (np.zeros((3, 28, 27)), np.zeros(3), "images of 28 x 27 pixels"),
        (np.zeros((0, 28, 28)), np.zeros(0), "no image"),
    ],
)
def test_files_that_do_not_fit_together_are_named(tmp_path, images, labels, message):
    write_mnist(tmp_path, packed=False)
    if images is not None:
        write(tmp_path / "train-images-idx3-ubyte", idx_bytes(images))
    write(tmp_path / "train-labels-idx1-ubyte", idx_bytes(labels))
    with pytest.raises(AlmaError, match=message):
        load_mnist(InputFiles(), tmp_path, "mnist")


@pytest.mark.parametrize("folder", [".", "gzip"])
def test_emnist_images_are_turned_upright(tmp_path, folder):
    images, labels = write_mnist(tmp_path / folder, num_classes=47, num_train=60, names=tuple(emnist_names("balanced")))
    read = load_emnist(InputFiles(), tmp_path, "balanced")
    assert np.array_equal(read.images[:, 0].swapaxes(1, 2), images)
    assert not np.array_equal(read.images[:, 0], images)
    assert np.array_equal(read.labels, labels)
    assert (read.dataset, read.num_classes) == ("emnist-balanced", 47)
    assert "turned upright" in read.remarks[0]


def test_labels_of_emnist_letters_begin_at_zero(tmp_path):
    names = tuple(emnist_names("letters"))
    _, labels = write_mnist(tmp_path, num_classes=26, first_label=1, names=names)
    assert (labels.min(), labels.max()) == (1, 26)
    read = load_emnist(InputFiles(), tmp_path, "letters")
    assert np.array_equal(read.labels, labels - 1)
    write_mnist(tmp_path, num_classes=26, first_label=0, names=names)
    with pytest.raises(AlmaError, match="label 0 found at image 0, 1 to 26 is needed"):
        load_emnist(InputFiles(), tmp_path, "letters")
