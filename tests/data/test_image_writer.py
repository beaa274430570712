"""Assign images to mega-batches and write a stream: sizes, seeds, statistics, fingerprint."""

import numpy as np
import pytest

from fairseq_alma.data.image_stream import ImageSet, assign_images, channel_statistics, write_image_stream
from fairseq_alma.errors import AlmaError

IMAGES = (np.arange(50 * 3 * 4 * 5) * 37 % 251).astype(np.uint8).reshape(50, 3, 4, 5)
LABELS = np.arange(50) % 7

# The assignment by seed 1, on which published results depend.
GOLDEN_TRAIN = [7, 0, 1, 2, 5, 9, 6, 3]
GOLDEN_VALID = [8, 4]


def write(root, seed=1, images=IMAGES, labels=LABELS, augment=False, **options):
    return write_image_stream(root, ImageSet("tiny", images, labels, 43, 7, augment), 4, seed, **options)


@pytest.mark.parametrize("num_train", [2, 43, 60, 1000])
@pytest.mark.parametrize("num_megabatches", [1, 3, 7, 21])
@pytest.mark.parametrize("valid_fraction", [0.001, 0.1, 0.5, 0.999])
def test_megabatches_are_equal_disjoint_and_have_both_parts(num_train, num_megabatches, valid_fraction):
    size = num_train // num_megabatches
    if size < 2:
        with pytest.raises(AlmaError, match=f"--megabatches {num_megabatches}: .* give at most {num_train // 2}"):
            assign_images(num_train, num_megabatches, 1, valid_fraction)
        return
    parts = assign_images(num_train, num_megabatches, 1, valid_fraction)
    assert len(parts) == num_megabatches
    num_valid = max(1, min(size - 1, round(valid_fraction * size)))
    assert {(len(train), len(valid)) for train, valid in parts} == {(size - num_valid, num_valid)}
    assigned = np.concatenate([one for part in parts for one in part])
    assert len(set(assigned.tolist())) == num_megabatches * size
    assert assigned.min() >= 0 and assigned.max() < num_train


def test_the_seed_determines_the_assignment_on_every_machine():
    assert [part.tolist() for part in assign_images(10, 1, 1, 0.2)[0]] == [GOLDEN_TRAIN, GOLDEN_VALID]
    assert assign_images(10, 1, 2, 0.2)[0][0].tolist() != GOLDEN_TRAIN


def test_channel_statistics_equal_a_float_calculation(tmp_path):
    assert write(tmp_path).images.mean == channel_statistics(IMAGES[:43])[0]  # without the test images
    mean, std = channel_statistics(IMAGES)
    assert mean == pytest.approx((IMAGES / 255).mean(axis=(0, 2, 3)), abs=1e-6)
    assert std == pytest.approx((IMAGES / 255).std(axis=(0, 2, 3)), abs=1e-6)


def test_fingerprint_depends_on_pixels_labels_and_seed_and_not_on_the_place(tmp_path):
    fingerprint = write(tmp_path / "a").fingerprint
    assert fingerprint == write(tmp_path / "b", history=[{"command": "create"}]).fingerprint
    valid = np.concatenate([np.load(tmp_path / f"a/megabatch-{t:03d}/valid.npy") for t in range(4)])
    assert np.array_equal(np.load(tmp_path / "a/valid.npy"), valid)
    assert fingerprint != write(tmp_path / "c", seed=2).fingerprint
    assert fingerprint != write(tmp_path / "d", augment=True).fingerprint
    order = write(tmp_path / "g", images=np.asfortranarray(IMAGES), labels=LABELS.astype(np.uint8))
    assert fingerprint == order.fingerprint
    images = IMAGES.copy()
    images[7, 0, 0, 0] ^= 1
    assert fingerprint != write(tmp_path / "e", images=images).fingerprint
    assert fingerprint != write(tmp_path / "f", labels=LABELS[::-1].copy()).fingerprint
