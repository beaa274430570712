"""Images of one's own: what is read, and what is refused."""

import io
from pathlib import Path

import numpy as np
import pytest

from data_prep.images.formats import ArrayFiles, load_arrays
from data_prep.images.image_set import InputFiles
from fairseq_alma.errors import AlmaError
from tests.data_prep.images.published import random_images

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
