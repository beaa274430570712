"""The images of a stream as fairseq's commands read them, batch by batch."""

from typing import Any, Optional, Sequence

import numpy as np
import torch
from fairseq.data import FairseqDataset, data_utils
from torch import Tensor

from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.errors import AlmaError
from fairseq_alma.images.stage_images import ImageInput


class ImageDataset(FairseqDataset):
    """Images of a stream under their indices.

    Args:
        stream: where they are.
        indices: (n) int64, which of them.
        source: normalises, and in training crops and flips.
        seed: of the order, the crops and the flips of each epoch.
        is_training: draw another order in each epoch, and augment where the data set says so.
    """

    def __init__(
        self, stream: ImageStream, indices: np.ndarray, source: ImageInput, seed: int, is_training: bool
    ) -> None:
        super().__init__()
        self.stream, self.indices, self.source = stream, indices, source
        self.seed, self.is_training, self.epoch = seed, is_training, 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one image as bytes, with its label."""
        row = self.indices[index]
        return {"id": index, "image": self.stream.images[row], "label": int(self.stream.labels[row])}

    def __len__(self) -> int:
        return len(self.indices)

    def num_tokens(self, index: int) -> int:
        """Return 1: an image counts as one token."""
        return 1

    def size(self, index: int) -> int:
        """Return 1, as `num_tokens`."""
        return 1

    def num_tokens_vec(self, indices: Sequence[int]) -> np.ndarray:
        """Return a 1 for each image."""
        return np.ones(len(indices), dtype=np.int64)

    def ordered_indices(self) -> np.ndarray:
        """Return the order of an epoch, another one for each in training."""
        if not self.is_training:
            return np.arange(len(self))
        with data_utils.numpy_seed(self.seed, self.epoch):
            return np.random.permutation(len(self))

    def batch_by_size(
        self,
        indices: np.ndarray,
        max_tokens: Optional[int] = None,
        max_sentences: Optional[int] = None,
        required_batch_size_multiple: int = 1,
    ) -> list[np.ndarray]:
        """Cut an epoch into batches, all images of it.

        Args:
            indices: their order.
            max_tokens: images of a batch.
            max_sentences: the same, of which fairseq's commands need one.
            required_batch_size_multiple: ignored. fairseq's own version drops a last batch that is no multiple of it,
                by default 8: images would not be trained on, or not be counted in a test.

        Raises:
            AlmaError: a batch would have no image.
        """
        size = min(limit for limit in (max_tokens, max_sentences) if limit is not None)
        if size < 1:
            raise AlmaError(f"--batch-size {size}: images of a batch, a number of at least 1 is needed")
        batches = np.split(indices, range(size, len(indices), size))
        if self.is_training and len(batches) > 1 and len(batches[-1]) == 1:  # batch norm needs more than one number
            batches[-2:] = [np.concatenate(batches[-2:])]
        return batches

    def collater(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Make a batch: (B, C, H, W) normalised images and (B) labels."""
        if not samples:
            return {}
        images = torch.from_numpy(np.stack([sample["image"] for sample in samples]))
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": len(samples),
            "net_input": {"images": self._prepare(images, first=samples[0]["id"])},
            "target": torch.tensor([sample["label"] for sample in samples]),
        }

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        super().set_epoch(epoch)
        self.epoch = epoch

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """Whether all epochs have the same batches."""
        return not self.is_training

    def _prepare(self, images: Tensor, first: int) -> Tensor:
        if not (self.is_training and self.source.augment):
            return self.source.normalised(images)
        # By what is in the batch, so that a worker process that starts in the middle of an epoch draws the same.
        seeds = np.random.SeedSequence([self.seed, self.epoch, first]).generate_state(1, np.uint64)
        return self.source.augmented(images, torch.Generator().manual_seed(int(seeds[0] >> 1)))
