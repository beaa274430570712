"""What is done to images before a network sees them: normalisation, and random crops and flips in training.

Letters: B images, C channels, H and W height and width.
"""

from typing import Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

PADDING = 4


class ImageInput:
    """Turns bytes into what networks take.

    Args:
        mean: of each channel over the training images of the data set, in units 0 to 1.
        std: of each channel, as mean.
        augment: in training, crop at random after padding by 4 black pixels, and flip every second image sideways.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], augment: bool) -> None:
        self.augment = augment
        self.mean = 255 * torch.tensor(mean)[:, None, None]
        self.std = 255 * torch.tensor(std)[:, None, None]

    def to(self, device: torch.device) -> "ImageInput":
        """Move to a device."""
        self.mean, self.std = self.mean.to(device), self.std.to(device)
        return self

    def normalised(self, images: Tensor) -> Tensor:
        """Return (..., C, H, W) bytes as floats of mean 0 and deviation 1 for each channel."""
        return (images.float() - self.mean) / self.std

    def augmented(self, images: Tensor, generator: Optional[Generator] = None) -> Tensor:
        """Crop and flip (B, C, H, W) bytes at random, then normalise.

        Args:
            images: on any device.
            generator: of the choices, on the CPU; None: torch's global one.
        """
        batch, _, height, width = images.shape
        device = images.device
        drawn = torch.randint(2 * PADDING + 1, (2, batch, 1), generator=generator)
        flip = torch.rand(batch, 1, generator=generator) < 0.5
        rows = drawn[0] + torch.arange(height)  # (B, H)
        columns = drawn[1] + torch.where(flip, torch.arange(width - 1, -1, -1), torch.arange(width))  # (B, W)
        padded = F.pad(images, (PADDING,) * 4).permute(0, 2, 3, 1)  # (B, H, W, C), so that C stays together
        each = torch.arange(batch, device=device)[:, None, None]
        crops = padded[each, rows.to(device)[:, :, None], columns.to(device)[:, None]]
        return self.normalised(crops.permute(0, 3, 1, 2).contiguous())
