"""CIFAR in both versions: equal images, and what damage answers."""

import pickle

import numpy as np
import pytest

from data_prep.images.formats import CIFAR10, CIFAR100, load_cifar
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


PIXELS = random_images(2, 3072)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("data_batch_3.bin", None, r"no data_batch_3\.bin in it"),
        *(
            ("test_batch.bin", bytes(size), rf"test_batch\.bin: {size} bytes found, a multiple of 3073 is needed")
            for size in (0, 3072, 3073 * 2 + 1)
        ),
        ("data_batch_2.bin", bytes(3073) + b"\x0a" + bytes(3072), "label 10 found at image 1, 0 to 9 is needed"),
        ("data_batch_4", python2_pickle(data=PIXELS), "no 'labels' in it, data found"),
        ("data_batch_4", python2_pickle(labels=[1, 2]), "no 'data' in it, labels found"),
        ("data_batch_4", python2_pickle(data=PIXELS[:, 1:], labels=[1, 2]), r"'data' is uint8 \(2, 3071\)"),
        ("data_batch_4", python2_pickle(data=PIXELS[0], labels=[1, 2]), r"'data' is uint8 \(3072,\)"),
        ("data_batch_4", python2_pickle(data=[1, 2], labels=[1, 2]), "'data' is list"),
        ("data_batch_4", python2_pickle(data=PIXELS, labels=[1]), "1 labels found, .* has 2 images"),
        ("data_batch_4", python2_pickle(data=PIXELS, labels=b"ab"), "'labels' is no list of whole numbers"),
        ("data_batch_4", python2_pickle(data=PIXELS, labels=[1, b"2"]), "'labels' is no list of whole numbers"),
        (
            "data_batch_4",
            pickle.dumps({"data": PIXELS, "labels": [1, 2**70]}, 4),
            "'labels' is no list of whole numbers",
        ),
        ("data_batch_4", python2_pickle(data=PIXELS, labels=[1, -2]), "label -2 found at image 1"),
        ("data_batch_4", python2_pickle(data=PIXELS[:0], labels=[]), "no list of whole numbers|no image"),
    ],
)
def test_missing_and_damaged_files_are_named_with_what_is_wrong(tmp_path, file, content, message):
    write_cifar10(tmp_path, "binary" if file.endswith(".bin") else "python")
    (tmp_path / file).unlink()
    if content is not None:
        write(tmp_path / file, content)
    with pytest.raises(AlmaError, match=message if file.endswith(".bin") else f"{file}: .*({message})"):
        load_cifar(InputFiles(), tmp_path, "cifar10", CIFAR10)


def test_folder_without_either_version_is_refused(tmp_path):
    with pytest.raises(AlmaError, match=r"neither the binary nor the python version of cifar10 in it; give the folder"):
        load_cifar(InputFiles(), tmp_path, "cifar10", CIFAR10)
