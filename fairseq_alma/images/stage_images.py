"""The images of one stage in memory, as its training draws them.

Letters: N members, B images of a batch, S training images of the stage, C channels, H and W height and width.
"""

from dataclasses import dataclass
from typing import Iterator, Optional, Sequence

import torch
from torch import Generator, Tensor

from fairseq_alma.images.image_input import ImageInput


@dataclass
class TrainingImages:
    """Training images of a stage, and what each member sees of them.

    Attributes:
        images: (S, C, H, W) bytes, or floats if they are normalised already.
        labels: (S) int64.
        rows: for each member its (S) rows of ``images``; of a bootstrap sample some rows come several times.
        rows_are_shared: whether every member sees each image once.
        source: crops, flips and normalises.
    """

    images: Tensor
    labels: Tensor
    rows: Sequence[Tensor]
    rows_are_shared: bool
    source: ImageInput

    @classmethod
    def of(
        cls, images: Tensor, labels: Tensor, bootstraps: Sequence[Optional[Tensor]], source: ImageInput
    ) -> "TrainingImages":
        """Take the images of a stage; what is not cropped at random is normalised once and for all.

        Args:
            images: (S, C, H, W) bytes.
            labels: (S) int64.
            bootstraps: for each member the (S) rows that it draws, or None: each image once.
            source: crops, flips and normalises.
        """
        everything = torch.arange(len(labels))
        return cls(
            images=images if source.augment else source.normalised(images),
            labels=labels,
            rows=[everything if rows is None else rows for rows in bootstraps],
            rows_are_shared=all(rows is None for rows in bootstraps),
            source=source,
        )

    @property
    def num_images(self) -> int:
        """S."""
        return len(self.labels)

    def epoch(self, batch_size: int, generators: Sequence[Generator]) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw the batches of one epoch, in an order of its own for each member.

        Args:
            batch_size: of all batches but the last.
            generators: of each member, on the CPU.

        Yields:
            (N, B, C, H, W) images, or (B, C, H, W) that all members share, and (N, B) labels.
        """
        if self._is_one_batch(batch_size):
            yield self.images, self.labels.expand(len(self.rows), -1)
            return
        orders = [
            rows[torch.randperm(len(rows), generator=one)] for rows, one in zip(self.rows, generators, strict=True)
        ]
        for batch in zip(*(order.split(self.sizes(batch_size)) for order in orders), strict=True):
            if self.source.augment:
                crops = [
                    self.source.augmented(self.images[rows], one) for rows, one in zip(batch, generators, strict=True)
                ]
                yield torch.stack(crops), self.labels[torch.stack(batch)]
            elif len(batch) == 1:
                yield self.images[batch[0]][None], self.labels[batch[0]][None]
            else:
                rows = torch.stack(batch)
                yield self.images[rows], self.labels[rows]

    def _is_one_batch(self, batch_size: int) -> bool:
        """Whether every member's epoch is one update on the same images, whose order then means nothing."""
        return self.num_images <= batch_size and not self.source.augment and self.rows_are_shared

    def sizes(self, batch_size: int) -> list[int]:
        """Cut S into batches."""
        return batch_sizes(self.num_images, batch_size)


def batch_sizes(num_images: int, batch_size: int) -> list[int]:
    """Cut images into batches. A last image alone joins the batch before: batch norm needs more than one number."""
    full, rest = divmod(num_images, batch_size)
    sizes = [batch_size] * full + [rest] * (rest > 0)
    if rest == 1 and full:
        sizes[-2:] = [batch_size + 1]
    return sizes


def bootstrap(num_images: int, generator: Generator) -> Tensor:
    """Draw (S) rows of S images with replacement (Breiman 1996, bagging)."""
    return torch.randint(num_images, (num_images,), generator=generator)
