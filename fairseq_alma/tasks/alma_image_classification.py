"""``alma_image_classification``: a stage of a stream of images, for fairseq's own commands.

    fairseq-train STREAM --user-dir fairseq_alma --task alma_image_classification --megabatch 3 \\
        --criterion alma_image_cross_entropy --arch alma_mlp --optimizer adadelta --lr 1.0 --max-epoch 100 \\
        --batch-size 128 --cpu
"""

import argparse
from dataclasses import dataclass, field
from typing import Any, Optional, Sequence

import numpy as np
import torch
from fairseq.data import FairseqDataset, data_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II, MISSING
from torch import Tensor

from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.schedule import stage_ending_with
from fairseq_alma.modules.image_input import ImageInput

# fairseq keeps the options of AdaDelta and SGD in its checkpoints as a Namespace, and cannot load them again since
# torch.load takes nothing but what is known to be harmless.
torch.serialization.add_safe_globals([argparse.Namespace])


@dataclass
class AlmaImageClassificationConfig(FairseqDataclass):
    """Options of the task."""

    data: str = field(default=MISSING, metadata={"help": "the stream, a folder that alma-prep-images has written"})
    megabatch: Optional[int] = field(
        default=None, metadata={"help": "train on the stage that ends with this mega-batch, from 0"}
    )
    wait: int = field(default=1, metadata={"help": "mega-batches gathered before an update"})
    replay: bool = field(
        default=False, metadata={"help": "train on all mega-batches so far, not on the new ones alone"}
    )
    seed: int = II("common.seed")
    # Not an option: which checkpoint the command was told to load; ensembles look for their members beside it.
    path: Optional[str] = II("common_eval.path")


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
        """
        size = min(limit for limit in (max_tokens, max_sentences) if limit is not None)
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


@register_task("alma_image_classification", dataclass=AlmaImageClassificationConfig)
class AlmaImageClassificationTask(FairseqTask):
    """Classify the images of a stream.

    Attributes:
        image_shape: (C, H, W).
        num_classes: K.
    """

    def __init__(self, cfg: AlmaImageClassificationConfig, stream: ImageStream) -> None:
        super().__init__(cfg)
        self.stream = stream
        self.image_shape: Sequence[int] = stream.shape
        self.num_classes = stream.num_classes
        self.source = ImageInput(stream.mean, stream.std, stream.augment)

    @classmethod
    def setup_task(cls, cfg: AlmaImageClassificationConfig, **unused: Any) -> "AlmaImageClassificationTask":
        """Open the stream."""
        return cls(cfg, ImageStream.open(cfg.data))

    def load_dataset(self, split: str, combine: bool = False, **unused: Any) -> None:
        """Load ``train``, ``valid`` (both of the stage) or ``test``; without --megabatch ``valid`` is that of all."""
        self.datasets[split] = ImageDataset(
            self.stream, self._indices(split), self.source, self.cfg.seed, is_training=split == "train"
        )

    @property
    def checkpoint_path(self) -> Optional[str]:
        """The checkpoint that the command loads, or None."""
        return self.cfg.path

    def max_positions(self) -> None:
        """Return None: images have no length."""
        return None

    @property
    def source_dictionary(self) -> None:
        """None: images have no dictionary."""
        return None

    @property
    def target_dictionary(self) -> None:
        """None, as `source_dictionary`."""
        return None

    def _indices(self, split: str) -> np.ndarray:
        cfg = self.cfg
        if split == "test":
            return self.stream.test_indices()
        if split not in ("train", "valid"):
            raise AlmaError(f"split {split!r}: a stream of images has train, valid and test")
        if cfg.megabatch is None:
            if split == "train":
                raise AlmaError("--megabatch: give the mega-batch that the stage ends with, from 0")
            return self.stream.valid_indices(range(self.stream.num_megabatches))
        stage = stage_ending_with(cfg.megabatch, self.stream.num_megabatches, cfg.wait, cfg.replay)
        if split == "train":
            return self.stream.train_indices(stage.megabatches)
        return self.stream.valid_indices(stage.megabatches)
