"""The command writes a complete stream or nothing; the loaders return the published arrays, and refuse bad files."""

import os
import re
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from data_prep.images import InputFiles, emnist_names, load_cifar, load_digits, load_idx, main, read_idx
from fairseq_alma.data.image_stream import ImageSet, ImageStream
from fairseq_alma.errors import AlmaError
from tests.data_prep.published_images import idx_bytes, random_images, save_arrays, write, write_cifar, write_mnist
from tests.data_prep.text.test_command import files_of
from tests.runs.fakes import write_manifest
from tests.scripts import usage_error


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def load(loader, source: Path, **options) -> ImageSet:
    return loader(InputFiles(), Namespace(source=source, **options))


def create(folder: Path, out: str = "stream", *more: object) -> ImageStream:
    """Write a stream of 3 mega-batches from a small MNIST."""
    if not (folder / "mnist").exists():
        write_mnist(folder / "mnist")
    assert run("mnist", "--source", folder / "mnist", "--out", folder / out, "--megabatches", 3, *more) == 0
    return ImageStream.open(folder / out)


def test_stream_contains_the_published_images_in_equal_megabatches(tmp_path, capsys):
    stream = create(tmp_path)
    images, labels = write_mnist(tmp_path / "again")
    assert np.array_equal(stream.images[:, 0], images) and np.array_equal(stream.labels, labels)
    assert stream.indices("test").tolist() == list(range(40, 50))
    assert [len(stream.indices("train", [t])) for t in range(3)] == [12] * 3
    assert [len(stream.indices("valid", [t])) for t in range(3)] == [1] * 3
    assert (stream.dataset, stream.num_classes, stream.shape, stream.augment) == ("mnist", 10, (1, 28, 28), False)
    stream.stream.verify([split.name for split in stream.stream.splits])
    out = capsys.readouterr().out
    assert "3 mega-batches, each with 12 training and 1 validation images" in out
    assert "1 training images not used" in out


def test_same_command_again_does_nothing_and_another_folder_gets_equal_files(tmp_path, capsys):
    first = create(tmp_path)
    before = (tmp_path / "stream/stream.json").stat().st_mtime_ns
    capsys.readouterr()
    create(tmp_path)
    assert "nothing to do" in capsys.readouterr().out
    assert (tmp_path / "stream/stream.json").stat().st_mtime_ns == before
    create(tmp_path, "other")
    assert files_of(tmp_path / "stream") == files_of(tmp_path / "other")
    assert ImageStream.open(tmp_path / "other").stream.fingerprint == first.stream.fingerprint
    (tmp_path / "stream/images.npy").unlink()
    with pytest.raises(AlmaError, match=r"images\.npy: expected a file"):
        run("mnist", "--source", tmp_path / "mnist", "--out", tmp_path / "stream", "--megabatches", 3)


def test_other_options_on_the_same_folder_are_refused_and_a_stream_of_text_too(tmp_path):
    create(tmp_path)
    with pytest.raises(AlmaError, match="was made with --seed 1, not with --seed 2; choose another --out"):
        create(tmp_path, "stream", "--seed", 2)
    write_manifest(tmp_path / "text", num_megabatches=2)
    with pytest.raises(AlmaError, match=r"--out .*: expected a stream of images, found text; choose another folder"):
        create(tmp_path, "text")


def test_too_many_megabatches_or_a_bad_file_write_nothing(tmp_path):
    write_mnist(tmp_path / "mnist")
    with pytest.raises(AlmaError, match=r"--megabatches 21: .*, found 1; give at most 20"):
        run("mnist", "--source", tmp_path / "mnist", "--out", tmp_path / "s", "--megabatches", 21)
    write(tmp_path / "mnist/t10k-labels-idx1-ubyte", idx_bytes(np.full(10, 77)), packed=True)
    with pytest.raises(AlmaError, match="found 77 at image 0"):
        create(tmp_path)
    assert os.listdir(tmp_path) == ["mnist"]


def test_natural_images_are_augmented_and_those_of_cifar100_may_have_coarse_labels(tmp_path):
    _, fine = write_cifar(tmp_path / "cifar", "cifar100")
    arguments = ["cifar100", "--source", tmp_path / "cifar", "--megabatches", 2, "--out", tmp_path / "s"]
    assert run(*arguments, "--coarse") == 0
    stream = ImageStream.open(tmp_path / "s")
    assert (stream.num_classes, stream.dataset, stream.augment) == (20, "cifar100-coarse", True)
    assert np.array_equal(stream.labels, fine // 5)


def test_arrays_may_hold_out_their_test_set(tmp_path, capsys):
    images = random_images(30, 6, 7, 3)
    options = save_arrays(tmp_path, images=images, labels=np.arange(30) % 5)
    arguments = [*options, "--channels", "last", "--name", "mine", "--augment", "--megabatches", 4]
    assert run("arrays", *arguments, "--out", tmp_path / "s") == 0
    stream = ImageStream.open(tmp_path / "s")
    assert (stream.dataset, stream.shape, stream.num_classes, stream.augment) == ("mine", (3, 6, 7), 5, True)
    assert len(stream.indices("test")) == 6
    assert "no test set given: 6 images are held out as the test set (seed 1)" in capsys.readouterr().out
    save_arrays(tmp_path, images=images.transpose(0, 3, 1, 2))
    assert run("arrays", *options, "--num-classes", 9, "--megabatches", 4, "--out", tmp_path / "first") == 0
    first = ImageStream.open(tmp_path / "first")
    assert np.array_equal(first.images, stream.images) and (first.num_classes, first.augment) == (9, False)


def test_arrays_may_come_with_a_test_set_and_labels_that_start_at_1_are_reported(tmp_path, capsys):
    images = random_images(34, 6, 7)
    trained = {"images": images[:30], "labels": np.arange(30) % 5 + 1}
    options = save_arrays(tmp_path, **trained, test_images=images[30:], test_labels=np.arange(4) + 1)
    assert run("arrays", *options, "--megabatches", 4, "--out", tmp_path / "s") == 0
    stream = ImageStream.open(tmp_path / "s")
    assert stream.indices("test").tolist() == [30, 31, 32, 33]
    assert np.array_equal(stream.images[30:, 0], images[30:])
    assert stream.labels[30:].tolist() == [1, 2, 3, 4]
    assert "labels range from 1 to 5: class 0 of 6 classes has no images" in capsys.readouterr().out


def write_folder(folder: Path, counts: dict[str, int], shape: tuple[int, ...] = (6, 7, 3)) -> np.ndarray:
    """Write PNG files for each class, rotated as EXIF records; return the images in the order of their names."""
    image = pytest.importorskip("PIL.Image")
    exif = image.Exif()
    exif[0x112] = 6  # Orientation: show the image turned by 90 degrees clockwise.
    images = random_images(sum(counts.values()), *shape, seed=len(counts))
    number = 0
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for _ in range(count):
            image.fromarray(np.rot90(images[number])).save(folder / name / f"{number:03d}.png", exif=exif)
            number += 1
    return images


def test_a_folder_of_image_files_has_a_class_for_each_subfolder(tmp_path, capsys):
    images = write_folder(tmp_path / "f", {"cat": 12, "train": 8})
    (tmp_path / "f/.hidden").mkdir()  # not a class
    arguments = ["folder", "--source", tmp_path / "f", "--megabatches", 4, "--name", "pets", "--out", tmp_path / "f/s"]
    assert run(*arguments) == run(*arguments[:-1], tmp_path / "f/s2") == run(*arguments) == 0
    assert "nothing to do" in capsys.readouterr().out
    stream = ImageStream.open(tmp_path / "f/s")
    assert (stream.dataset, stream.shape, stream.num_classes, len(stream.indices("test"))) == ("pets", (3, 6, 7), 2, 4)
    found = {image.tobytes(): label for image, label in zip(stream.images, stream.labels.tolist(), strict=True)}
    assert found == {each.transpose(2, 0, 1).tobytes(): int(at >= 12) for at, each in enumerate(images)}
    (tmp_path / "f/cat/011.png").rename(tmp_path / "f/train/011.png")
    with pytest.raises(AlmaError, match=r"made from different input \(changed or new files: train/011\.png"):
        run(*arguments)
    pytest.importorskip("PIL.Image").fromarray(np.zeros((6, 7), np.uint16)).save(tmp_path / "f/train/y.png")
    with pytest.raises(AlmaError, match=r"y\.png: expected 8 bits per channel, found mode I;16"):
        run(*arguments)
    (tmp_path / "f/train/y.png").write_bytes(b"no image")
    with pytest.raises(AlmaError, match=r"y\.png: Pillow cannot read this file"):
        run(*arguments)
    (tmp_path / "f/train/y.png").unlink()
    write_folder(tmp_path / "f", {"eel": 2}, (5, 7, 3))
    with pytest.raises(AlmaError, match=r"of shape \(3, 6, 7\) as in .*, found \(3, 5, 7\); convert all images"):
        run(*arguments)
    write_folder(tmp_path / "g/train", {"cat": 5})
    write_folder(tmp_path / "g/val", {"cat": 5})
    assert run("folder", "--source", tmp_path / "g", "--megabatches", 2, "--out", tmp_path / "u") == 0
    assert re.search("folders not used: val\nno test set given: 1 images", capsys.readouterr().out)
    write_folder(tmp_path / "g/test", {"dog": 3})
    own = ("--test-fraction", 0.5, "--megabatches", 2, "--out")
    with pytest.raises(SystemExit):  # a test set is given
        run("folder", "--source", tmp_path / "g", *own, tmp_path / "t")
    write_folder(tmp_path / "h", {"cat": 5, "test": 5})  # without ``train``, ``test`` is a class
    assert run("folder", "--source", tmp_path / "h", *own, tmp_path / "h/s") == 0
    for path in (tmp_path / "g/train/cat").iterdir():
        pytest.importorskip("PIL.Image").open(path).convert("1").save(path)
    assert run("folder", "--source", tmp_path / "g/train", "--megabatches", 2, "--out", tmp_path / "bw") == 0
    assert ImageStream.open(tmp_path / "bw").shape[0] == 1
    with pytest.raises(AlmaError, match=r"test: expected only the classes of .*train, found dog; add"):
        run("folder", "--source", tmp_path / "g", "--megabatches", 2, "--out", tmp_path / "t")
    with pytest.raises(AlmaError, match="no subfolders found; give a folder with"):
        run("folder", "--source", tmp_path / "f/train", "--megabatches", 4, "--out", tmp_path / "t")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("svhn", "invalid choice"),
        ("mnist --source a --valid-fraction 1", "expected a number below 1"),
        ("mnist --source a --megabatches 10001", "expected a number of at most 10,000"),
        ("arrays", "--test-labels: missing; add this option, or remove --test-images"),
        ("arrays --test-labels d --test-fraction 0.1", "--test-fraction: not allowed with --test-images"),
    ],
)
def test_usage_errors_end_with_status_2(arguments, message, capsys):
    arguments += " --images a --labels b --test-images c" if "arrays" in arguments else ""
    assert message in usage_error(capsys, main, f"{arguments} --out s --megabatches 2".split())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx_bytes(np.zeros(9)), "expected an idx file of bytes with 3 dimensions.* found 00 00 08 01"),
        (idx_bytes(np.zeros((2, 3, 4)))[:9], r"dimensions \(first bytes 00 00 08 03\), found 9 bytes;"),
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
        load(load_idx, tmp_path, dataset="mnist", split="")
    with pytest.raises(AlmaError, match=r"--source .*nowhere: expected train-images-idx3-ubyte or"):
        load(load_idx, tmp_path / "nowhere", dataset="mnist", split="")


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
        load(load_idx, tmp_path, dataset="mnist", split="")


@pytest.mark.parametrize("folder", [".", "gzip"])
def test_emnist_images_are_transposed(tmp_path, folder):
    images, labels = write_mnist(tmp_path / folder, num_classes=47, num_train=60, names=tuple(emnist_names("balanced")))
    read = load(load_idx, tmp_path, dataset="emnist", split="balanced")
    assert np.array_equal(read.images[:, 0].swapaxes(1, 2), images) and np.array_equal(read.labels, labels)
    assert not np.array_equal(read.images[:, 0], images)
    assert (read.dataset, read.num_classes) == ("emnist-balanced", 47)
    assert "transposed" in read.remarks[0]


def test_labels_of_emnist_letters_start_at_zero(tmp_path):
    names = tuple(emnist_names("letters"))
    _, labels = write_mnist(tmp_path, num_classes=26, first_label=1, names=names)
    assert (labels.min(), labels.max()) == (1, 26)
    assert np.array_equal(load(load_idx, tmp_path, dataset="emnist", split="letters").labels, labels - 1)
    write_mnist(tmp_path, num_classes=26, first_label=0, names=names)
    with pytest.raises(AlmaError, match="expected labels from 1 to 26, found 0 at image 0"):
        load(load_idx, tmp_path, dataset="emnist", split="letters")


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin"])
def test_cifar10_keeps_the_order_of_publication(tmp_path, folder):
    images, labels = write_cifar(tmp_path / folder, "cifar10")
    read = load(load_cifar, tmp_path, dataset="cifar10", coarse=False)
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
        load(load_cifar, tmp_path, dataset="cifar10", coarse=False)


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
    options = save_arrays(tmp_path, images=images, labels=labels)
    with pytest.raises(AlmaError, match=message):
        run("arrays", *options, "--megabatches", 2, "--out", tmp_path / "s")


def test_digits_are_scaled_so_that_white_is_255(tmp_path):
    rows = np.column_stack([np.arange(64 * 5).reshape(5, 64) % 17, np.arange(5)])
    np.savetxt(tmp_path / "digits.csv", rows, delimiter=",", fmt="%d")
    read = load(load_digits, tmp_path, test_fraction=0.4, seed=1)
    assert (read.num_train, read.images.shape, read.images.min(), read.images.max()) == (3, (5, 1, 8, 8), 0, 255)


@pytest.mark.parametrize("content", ["a,b", "", "1,2\n3,4", f"{'1,' * 64}0\n{'17,' * 64}1"])
def test_a_table_of_digits_with_other_content_is_refused(tmp_path, content, recwarn):
    (tmp_path / "digits.csv").write_text(content)
    with pytest.raises(AlmaError, match=r"not a table of integers|64 pixels from 0 to 16, found"):
        load(load_digits, tmp_path, test_fraction=0.4, seed=1)
    assert not recwarn
