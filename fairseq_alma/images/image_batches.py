"""Batches of training images: random generators, the image order of each member, and random crops and flips.

Letters in shapes: N members, B images in a batch, S images in an epoch, C channels, H height, W width.
"""

from typing import Iterator, Optional, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

INITIAL_WEIGHTS, ORDER, BOOTSTRAP, GROWTH = range(4)
PADDING = 4


def seeded(*numbers: int) -> torch.Generator:
    """Return a random generator on the CPU, seeded with ``numbers`` (such as random seed, stage number, `ORDER`)."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)


class ImageInput:
    """Converter of uint8 images to network input.

    Args:
        mean: mean of each channel over the training images of the data set, for pixel values from 0 to 1.
        std: standard deviation of each channel, on the same scale as ``mean``.
        augment: whether training images are padded with 4 black pixels on each side, cropped at random and flipped
            horizontally with probability 0.5.
        device: device of the images; None: CPU.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], augment: bool, device: Optional[torch.device] = None
    ) -> None:
        self.augment = augment
        self.mean = 255 * torch.tensor(mean)[:, None, None].to(device)
        self.std = 255 * torch.tensor(std)[:, None, None].to(device)

    def normalised(self, images: Tensor) -> Tensor:
        """Normalize uint8 images (..., C, H, W) with the mean and the standard deviation of each channel."""
        return (images.float() - self.mean) / self.std

    def augmented(self, images: Tensor, generator: Generator) -> Tensor:
        """Crop and flip uint8 images (B, C, H, W) with a random generator on the CPU; return the normalized images."""
        batch, _, height, width = images.shape
        device = images.device
        top, left = torch.randint(2 * PADDING + 1, (2, batch, 1), generator=generator)
        flip = torch.rand(batch, 1, generator=generator) < 0.5
        rows = top + torch.arange(height)  # (B, H)
        columns = left + torch.where(flip, torch.arange(width - 1, -1, -1), torch.arange(width))  # (B, W)
        padded = F.pad(images, (PADDING,) * 4).permute(0, 2, 3, 1)  # (B, H, W, C), for contiguous reads
        each = torch.arange(batch, device=device)[:, None, None]
        crops = padded[each, rows.to(device)[:, :, None], columns.to(device)[:, None]]
        return self.normalised(crops.permute(0, 3, 1, 2).contiguous())


class TrainingImages:
    """Training images of a stage, with the selection of images that each member trains on.

    Args:
        images: uint8 images (n, C, H, W).
        labels: int64 labels (n).
        rows: for each member, indices (S) of ``images``, such as a bootstrap sample; None: each image once.
        source: converter of the images to network input.
    """

    def __init__(self, images: Tensor, labels: Tensor, rows: Sequence[Optional[Tensor]], source: ImageInput) -> None:
        self.images = images if source.augment else source.normalised(images)
        self.labels, self.source = labels, source
        everything = torch.arange(len(labels))
        self.rows = [everything if own is None else own for own in rows]
        self.rows_are_shared = all(own is None for own in rows)
        self.num_images = len(self.rows[0])

    def epoch(self, batch_size: int, generators: Sequence[Generator]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of one epoch. Each member's generator determines the member's image order and crops.

        Yields:
            (images, labels): images (N, B, C, H, W), or (B, C, H, W) if all members share a batch; labels (N, B).
        """
        if self.num_images <= batch_size and not self.source.augment and self.rows_are_shared:  # one batch
            yield self.images, self.labels.expand(len(self.rows), -1)
            return
        orders = [
            rows[torch.randperm(len(rows), generator=one)] for rows, one in zip(self.rows, generators, strict=True)
        ]
        for batch in zip(*(order.split(batch_sizes(self.num_images, batch_size)) for order in orders), strict=True):
            rows = torch.stack(batch)
            images = self.images[rows]
            if self.source.augment:
                members = zip(images, generators, strict=True)
                images = torch.stack([self.source.augmented(own, generator) for own, generator in members])
            yield images, self.labels[rows]


def batch_sizes(num_images: int, batch_size: int) -> list[int]:
    """Return the batch sizes of an epoch. A single last image joins the previous batch: batch norm needs two images."""
    full, rest = divmod(num_images, batch_size)
    sizes = [batch_size] * full + [rest] * (rest > 0)
    if rest == 1 and full:
        sizes[-2:] = [batch_size + 1]
    return sizes


def bootstrap(num_images: int, generator: Generator) -> Tensor:
    """Return a bootstrap sample: ``num_images`` row indices, sampled with replacement (Breiman 1996, bagging)."""
    return torch.randint(num_images, (num_images,), generator=generator)
