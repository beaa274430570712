"""Normalize, crop and flip images; batches for fairseq."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.images.image_task import ImageDataset
from fairseq_alma.images.stage_trainer import PADDING, ImageInput, seeded
from tests.images.image_streams import make_stream

MEAN, STD = [0.5, 0.25, 0.125], [0.2, 0.3, 0.4]
SOURCE = ImageInput(MEAN, STD, augment=True)


def bytes_of(num_images, height=6, width=9, seed=0):
    """Return random bytes, so that every crop is distinct."""
    return torch.randint(1, 256, (num_images, 3, height, width), generator=seeded(seed), dtype=torch.uint8)


def all_crops(image):
    """Return every crop of one padded image, straight and mirrored, normalised: (2, 9, 9, C, H, W)."""
    height, width = image.shape[1:]
    black = F.pad(image, (PADDING,) * 4)
    places = [torch.stack([black[:, row : row + height, left : left + width] for left in range(9)]) for row in range(9)]
    straight = torch.stack(places)
    return SOURCE.normalised(torch.stack([straight, straight.flip(-1)]))


def test_normalised_images_are_those_of_the_formula():
    images = bytes_of(4)
    found = SOURCE.normalised(images)
    assert found.dtype == torch.float32
    for channel in range(3):
        expected = (images[:, channel] / 255 - MEAN[channel]) / STD[channel]
        torch.testing.assert_close(found[:, channel], expected, rtol=1e-4, atol=1e-6)


def test_every_augmented_image_is_a_crop_of_its_padded_image():
    images = bytes_of(50)
    for image, found in zip(images, SOURCE.augmented(images, seeded(1)), strict=True):
        same = (all_crops(image) == found).flatten(3).all(dim=3)  # flipped?, row, column
        assert same.any()


def test_all_crops_and_both_directions_are_about_equally_frequent():
    image = bytes_of(1)
    crops = all_crops(image[0]).flatten(3)
    found = SOURCE.augmented(image.expand(1620, -1, -1, -1), seeded(1)).flatten(1)
    places = (crops[None] == found[:, None, None, None]).all(dim=4)  # (1620, 2, 9, 9)
    assert (places.flatten(1).sum(dim=1) == 1).all()
    counts = places.sum(dim=0)
    assert 720 < counts[0].sum() < 900  # 810 plus or minus 4.5 deviations
    for dim in (1, 2):
        along = counts.sum(dim=(0, 3 - dim))
        assert len(along) == 9 and along.min() > 120 and along.max() < 245  # 180 each, 4.5 deviations
    assert (counts > 0).float().mean() > 0.99


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return ImageStream.open(make_stream(tmp_path_factory.mktemp("images") / "S", num_megabatches=2, num_train=120))


def dataset_of(stream, num_images=33, is_training=True, seed=1, augment=False):
    source = ImageInput(stream.mean, stream.std, augment)
    return ImageDataset(stream, stream.indices("train", [1])[:num_images], source, seed, is_training)


@pytest.mark.parametrize(
    ("is_training", "size", "sizes"),
    [(True, 10, [10, 10, 10, 3]), (False, 10, [10, 10, 10, 3]), (True, 16, [16, 17]), (False, 16, [16, 16, 1])],
)
def test_batches_have_every_image_once_and_in_training_no_image_alone(stream, is_training, size, sizes):
    dataset = dataset_of(stream, is_training=is_training)
    batches = dataset.batch_by_size(dataset.ordered_indices(), max_sentences=size, required_batch_size_multiple=8)
    assert [len(batch) for batch in batches] == sizes
    assert sorted(np.concatenate(batches)) == list(range(33))


def test_each_epoch_has_an_order_of_its_own_which_seed_and_epoch_decide(stream):
    def order(seed, epoch):
        dataset = dataset_of(stream, seed=seed)
        dataset.set_epoch(epoch)
        return dataset.ordered_indices().tolist()

    assert order(1, 1) == order(1, 1)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (1, 2)}) == 4
    assert dataset_of(stream, is_training=False).ordered_indices().tolist() == list(range(33))


def test_a_batch_is_normalised_and_counts_each_image_as_a_token(stream):
    dataset = dataset_of(stream, is_training=False)
    batch = dataset.collater([dataset[index] for index in range(7)])
    rows = stream.indices("train", [1])[:7]
    expected = (torch.from_numpy(stream.images[rows]) / 255 - stream.mean[0]) / stream.std[0]
    torch.testing.assert_close(batch["net_input"]["images"], expected, rtol=1e-4, atol=1e-5)
    assert batch["target"].tolist() == stream.labels[rows].tolist()
    assert (batch["ntokens"], batch["nsentences"], batch["id"].tolist()) == (7, 7, list(range(7)))
    assert dataset.collater([]) == {}


def test_crops_depend_on_the_epoch_and_not_on_which_worker_makes_the_batch(stream):
    def batch(epoch, dataset, first=3):
        dataset.set_epoch(epoch)
        return dataset.collater([dataset[index] for index in range(first, first + 5)])["net_input"]["images"]

    one, other = (dataset_of(stream, augment=True) for _ in range(2))
    first = batch(1, one)
    batch(1, other, first=9)  # another batch in between changes nothing
    assert torch.equal(batch(1, other), first)
    assert not torch.equal(batch(2, one), first)
    plain = dataset_of(stream, augment=True, is_training=False)
    images = torch.from_numpy(stream.images[stream.indices("train", [1])[3:8]])
    torch.testing.assert_close(batch(1, plain), plain.source.normalised(images))
