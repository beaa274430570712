"""What is done to images before a network sees them."""

import pytest
import torch
import torch.nn.functional as F

from fairseq_alma.images.stage_images import PADDING, ImageInput

MEAN, STD = [0.5, 0.25, 0.125], [0.2, 0.3, 0.4]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def bytes_of(num_images, height=6, width=9, seed=0):
    """Distinct enough that a crop is found at one place."""
    return torch.randint(1, 256, (num_images, 3, height, width), generator=seeded(seed), dtype=torch.uint8)


@pytest.fixture
def source():
    return ImageInput(MEAN, STD, augment=True)


def all_crops(image, source):
    """Return every crop of one padded image, straight and mirrored, normalised: (2, 9, 9, C, H, W)."""
    height, width = image.shape[1:]
    black = F.pad(image, (PADDING,) * 4)
    places = [torch.stack([black[:, row : row + height, left : left + width] for left in range(9)]) for row in range(9)]
    straight = torch.stack(places)
    return source.normalised(torch.stack([straight, straight.flip(-1)]))


def test_normalised_images_are_those_of_the_formula(source):
    images = bytes_of(4)
    found = source.normalised(images)
    assert found.dtype == torch.float32
    for channel in range(3):
        expected = (images[:, channel] / 255 - MEAN[channel]) / STD[channel]
        torch.testing.assert_close(found[:, channel], expected, rtol=1e-4, atol=1e-6)


def test_any_number_of_dimensions_may_stand_before_the_channels(source):
    images = bytes_of(6)
    assert torch.equal(source.normalised(images.view(2, 3, 3, 6, 9)).flatten(0, 1), source.normalised(images))


def test_every_augmented_image_is_one_crop_of_its_own_padded_image(source):
    images = bytes_of(50)
    for image, found in zip(images, source.augmented(images, seeded(1)), strict=True):
        same = (all_crops(image, source) == found).flatten(3).all(dim=3)  # flipped?, row, column
        assert same.any()


def test_all_places_and_both_directions_come_up_about_equally_often(source):
    image = bytes_of(1)
    crops = all_crops(image[0], source).flatten(3)
    found = source.augmented(image.expand(1620, -1, -1, -1), seeded(1)).flatten(1)
    places = (crops[None] == found[:, None, None, None]).all(dim=4)  # (1620, 2, 9, 9)
    assert (places.flatten(1).sum(dim=1) == 1).all()
    counts = places.sum(dim=0)
    assert 720 < counts[0].sum() < 900  # 810 plus or minus 4.5 deviations
    for dim in (1, 2):
        along = counts.sum(dim=(0, 3 - dim))
        assert len(along) == 9 and along.min() > 120 and along.max() < 245  # 180 each, 4.5 deviations
    assert (counts > 0).float().mean() > 0.99


def test_padding_is_black(source):
    images = torch.full((200, 3, 12, 12), 255, dtype=torch.uint8)
    found = source.augmented(images, seeded(1))
    white, black = source.normalised(images[:1])[0, :, :1, :1], source.normalised(0 * images[:1])[0, :, :1, :1]
    assert ((found == white) | (found == black)).all()
    assert (found == black).any() and (found[:, :, 4:8, 4:8] == white).all()  # a crop is at most 4 off its place


def test_the_generator_decides(source):
    images = bytes_of(20)
    first, again, other = (source.augmented(images, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_what_comes_out_of_one_generator_differs_from_batch_to_batch(source):
    generator, images = seeded(1), bytes_of(20)
    assert not torch.equal(source.augmented(images, generator), source.augmented(images, generator))
