"""CIFAR in both versions: equal images, and what damage answers."""

import pickle

import numpy as np
import pytest

from data_prep.images.cifar import CIFAR10, CIFAR100, load_cifar
from data_prep.images.image_set import InputFiles
from fairseq_alma.errors import AlmaError
from tests.data_prep.images.published import python2_pickle, random_images, write, write_cifar10, write_cifar100


@pytest.mark.parametrize(("version", "folder"), [("binary", "cifar-10-batches-bin"), ("python", "cifar-10-batches-py")])
@pytest.mark.parametrize("unpacked", [True, False])
def test_cifar10_comes_in_the_order_of_publication(tmp_path, version, folder, unpacked):
    images, labels = write_cifar10(tmp_path / (folder if unpacked else "."), version)
    read = load_cifar(InputFiles(), tmp_path, "cifar10", CIFAR10)
    assert np.array_equal(read.images, images)
    assert np.array_equal(read.labels, labels)
    assert (read.num_train, read.num_classes, read.augment) == (30, 10, True)


@pytest.mark.parametrize(("version", "folder"), [("binary", "cifar-100-binary"), ("python", "cifar-100-python")])
def test_cifar100_has_fine_and_coarse_labels(tmp_path, version, folder):
    images, fine = write_cifar100(tmp_path / folder, version)
    read = load_cifar(InputFiles(), tmp_path, "cifar100", CIFAR100)
    assert np.array_equal(read.images, images)
    assert np.array_equal(read.labels, fine)
    assert (read.num_train, read.num_classes) == (30, 100)
    coarse = load_cifar(InputFiles(), tmp_path, "cifar100-coarse", CIFAR100, "coarse")
    assert np.array_equal(coarse.labels, fine // 5)
    assert coarse.num_classes == 20


def test_binary_version_is_taken_where_both_are(tmp_path):
    write_cifar10(tmp_path, "binary")
    write_cifar10(tmp_path, "python")
    files = InputFiles()
    load_cifar(files, tmp_path, "cifar10", CIFAR10)
    assert {record["name"][-4:] for record in files.records} == {".bin"}


def test_folder_without_either_version_is_refused(tmp_path):
    with pytest.raises(AlmaError, match=r"neither the binary nor the python version of cifar10 in it; give the folder"):
        load_cifar(InputFiles(), tmp_path, "cifar10", CIFAR10)


def test_missing_batch_is_named(tmp_path):
    write_cifar10(tmp_path, "binary")
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(AlmaError, match=r"no data_batch_3\.bin in it"):
        load_cifar(InputFiles(), tmp_path, "cifar10", CIFAR10)


@pytest.mark.parametrize("size", [0, 3072, 3073 * 2 + 1])
def test_binary_file_that_is_no_multiple_of_a_record_is_refused(tmp_path, size):
    write_cifar10(tmp_path, "binary")
    write(tmp_path / "test_batch.bin", bytes(size))
    with pytest.raises(AlmaError, match=rf"test_batch\.bin: {size} bytes found, a multiple of 3073 is needed"):
        load_cifar(InputFiles(), tmp_path, "cifar10", CIFAR10)


def test_label_out_of_range_is_refused(tmp_path):
    write_cifar10(tmp_path, "binary")
    write(tmp_path / "data_batch_2.bin", bytes(3073) + b"\x0a" + bytes(3072))
    with pytest.raises(AlmaError, match=r"data_batch_2\.bin: label 10 found at image 1, 0 to 9 is needed"):
        load_cifar(InputFiles(), tmp_path, "cifar10", CIFAR10)


PIXELS = random_images(2, 3072)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (python2_pickle(data=PIXELS), "no 'labels' in it, data found"),
        (python2_pickle(labels=[1, 2]), "no 'data' in it, labels found"),
        (python2_pickle(data=PIXELS[:, 1:], labels=[1, 2]), r"'data' is uint8 \(2, 3071\)"),
        (python2_pickle(data=PIXELS[0], labels=[1, 2]), r"'data' is uint8 \(3072,\)"),
        (python2_pickle(data=[1, 2], labels=[1, 2]), "'data' is list"),
        (python2_pickle(data=PIXELS, labels=[1]), "1 labels found, .* has 2 images"),
        (python2_pickle(data=PIXELS, labels=b"ab"), "'labels' is no list of whole numbers"),
        (python2_pickle(data=PIXELS, labels=[1, b"2"]), "'labels' is no list of whole numbers"),
        (pickle.dumps({"data": PIXELS, "labels": [1, 2**70]}, 4), "'labels' is no list of whole numbers"),
        (python2_pickle(data=PIXELS, labels=[1, -2]), "label -2 found at image 1"),
        (python2_pickle(data=PIXELS[:0], labels=[]), "no list of whole numbers|no image"),
    ],
)
def test_python_file_with_other_content_is_refused(tmp_path, content, message):
    write_cifar10(tmp_path, "python")
    write(tmp_path / "data_batch_4", content)
    with pytest.raises(AlmaError, match=f"data_batch_4: .*{message}"):
        load_cifar(InputFiles(), tmp_path, "cifar10", CIFAR10)
