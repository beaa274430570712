"""Task ``alma_image_classification`` (image classification on a stage of a stream), with dataset and criterion.

    fairseq-train STREAM --user-dir fairseq_alma --task alma_image_classification --megabatch 3 \\
        --criterion alma_image_cross_entropy --arch alma_mlp --optimizer adadelta --lr 1.0 --max-epoch 100 \\
        --batch-size 128 --cpu
"""

from dataclasses import dataclass, field
from typing import Any, Optional, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.data import FairseqDataset, data_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from fairseq.tasks import register_task
from omegaconf import II, MISSING
from torch import Tensor

from fairseq_alma.checkpoints import JOINT_MODEL
from fairseq_alma.checkpoints.checkpoint_file import ENSEMBLE_ARCH, read_checkpoint
from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.errors import AlmaError, in_one_line
from fairseq_alma.images.image_models import image_architectures
from fairseq_alma.images.stage_trainer import ImageInput, batch_sizes, seeded
from fairseq_alma.learners.learner import StageOptions, stage_ending_with
from fairseq_alma.training.feature import FEATURES
from fairseq_alma.training.stage_task import (
    CommandConfig,
    StageTask,
    check_options,
    fairseq_config,
    features_of,
    load_for_task,
    require_batch_size,
)


class ImageDataset(FairseqDataset):
    """Dataset of the stream's images at ``indices`` (n); batches contain normalized images.

    In training, each epoch has a new random order and, with ``source.augment``, new random crops and flips.
    """

    def __init__(
        self, stream: ImageStream, indices: np.ndarray, source: ImageInput, seed: int, is_training: bool
    ) -> None:
        super().__init__()
        self.stream, self.indices, self.source = stream, indices, source
        self.seed, self.is_training, self.epoch = seed, is_training, 1
        self.sizes = np.ones(len(indices), dtype=np.int64)  # fairseq compares the sizes with --max-tokens

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.indices[index]
        return {"id": index, "image": self.stream.images[row], "label": int(self.stream.labels[row])}

    def __len__(self) -> int:
        return len(self.indices)

    def ordered_indices(self) -> np.ndarray:
        """Return positions in ``indices``, in the order of the current epoch: random in training, else ascending."""
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
        """Split ``indices`` into batches. The batch size is the minimum of ``max_tokens`` and ``max_sentences``.

        In training, a single last image joins the previous batch. The method ignores
        ``required_batch_size_multiple``, which would reduce the batch size to a multiple of 8.
        """
        size = min(limit for limit in (max_tokens, max_sentences) if limit is not None)
        if self.is_training:
            return np.split(indices, np.cumsum(batch_sizes(len(indices), size))[:-1])
        return np.split(indices, range(size, len(indices), size))

    def collater(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch with normalized images (B, C, H, W) and labels (B)."""
        if not samples:
            return {}
        images = torch.from_numpy(np.stack([sample["image"] for sample in samples]))
        if self.is_training and self.source.augment:
            # The batch determines the seed, so that crops do not depend on the worker process that loads the batch.
            images = self.source.augmented(images, seeded(self.seed, self.epoch, samples[0]["id"]))
        else:
            images = self.source.normalised(images)
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": len(samples),
            "net_input": {"images": images},
            "target": torch.tensor([sample["label"] for sample in samples]),
        }

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        return not self.is_training


@dataclass
class ImageTaskConfig(CommandConfig):
    """Options of the task: stream folder, and options that fairseq's commands define."""

    data: str = field(default=MISSING, metadata={"help": "stream folder written by alma-prep-images"})
    seed: int = II("common.seed")


AlmaImageClassificationConfig = fairseq_config(
    "AlmaImageClassificationConfig", ImageTaskConfig, [StageOptions, *FEATURES], "images"
)


@register_task("alma_image_classification", dataclass=AlmaImageClassificationConfig)
class AlmaImageClassificationTask(StageTask):
    """fairseq task for image classification on a stream.

    Attributes:
        image_shape: shape of the images, (C, H, W).
        num_classes: number of classes.
    """

    kind, stream_config = "images", ImageTaskConfig
    target_dictionary = None  # fairseq's criterions read this attribute

    def __init__(self, cfg: Any, stream: ImageStream) -> None:
        super().__init__(cfg)
        self.stream, self.features = stream, features_of(cfg)
        self.image_shape: Sequence[int] = stream.shape
        self.num_classes = stream.num_classes
        self.source = ImageInput(stream.mean, stream.std, stream.augment)

    @classmethod
    @in_one_line()
    def setup_task(cls, cfg: Any, **unused: Any) -> "AlmaImageClassificationTask":
        check_options(cfg)
        task = cls(cfg, ImageStream.open(cfg.data))
        load_for_task(str(cfg.continue_once), task.features.begin)
        return task

    @in_one_line()
    def load_dataset(self, split: str, combine: bool = False, **unused: Any) -> None:
        """Load a split: ``train`` or ``valid`` (training or validation images of the stage), or ``test`` (test set).

        Without --megabatch, ``valid`` contains the validation images of all mega-batches.
        """
        stream, cfg = self.stream, self.cfg
        if split not in ("train", "valid", "test"):
            raise AlmaError(f"split {split!r}: unknown split; choose from train, valid, test")
        megabatches = None
        if cfg.megabatch is not None and split != "test":
            stage = stage_ending_with(cfg.megabatch, stream.stream.num_megabatches, cfg.wait, cfg.replay)
            megabatches = stage.megabatches
        elif split == "train":
            raise AlmaError(
                "--megabatch: missing; give the index of the last mega-batch of the stage (numbered from 0)"
            )
        indices = stream.indices(split, megabatches)
        self.datasets[split] = ImageDataset(stream, indices, self.source, cfg.seed, is_training=split == "train")

    def get_batch_iterator(self, dataset: Any, **given: Any) -> Any:
        require_batch_size(given)
        return super().get_batch_iterator(dataset, **given)

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> BaseFairseqModel:
        """Build the image model of ``cfg``, and check that it matches the checkpoint that training starts from.

        Raises:
            AlmaError: the model is not an image model, or does not match the checkpoint.
        """
        with in_one_line():  # a decorator would hide the argument names, which fairseq inspects
            possible = sorted([JOINT_MODEL, *image_architectures()])
            if cfg._name not in (ENSEMBLE_ARCH, *possible):
                raise AlmaError(f"--arch {cfg._name}: not an image model; choose from {', '.join(possible)}")
            start = None if from_checkpoint else self.find_start(self.cfg)[0]
            if start is None:
                return super().build_model(cfg, from_checkpoint)
            return self.build_to_continue(cfg, read_checkpoint(start), start)


@register_criterion("alma_image_cross_entropy", dataclass=FairseqDataclass)
class AlmaImageCrossEntropy(FairseqCriterion):
    """Cross-entropy criterion that logs ``loss`` (nats per image) and ``error`` (share of misclassified images)."""

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Return (loss in nats, number of images, logging output).

        The loss is the sum over images if ``reduce`` is True, else a tensor with one value per image.
        """
        logits, target = model(**sample["net_input"]), sample["target"]
        loss, num_images = F.cross_entropy(logits, target, reduction="sum" if reduce else "none"), len(target)
        log = {
            "loss": loss.detach().sum(),
            "num_wrong": (logits.argmax(dim=-1) != target).sum(),
            "ntokens": num_images,
            "nsentences": num_images,
            "sample_size": num_images,
        }
        return loss, num_images, log

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        num_images = sum(log["sample_size"] for log in logging_outputs)
        for name, total in (("loss", "loss"), ("error", "num_wrong")):
            value = sum(log[total] for log in logging_outputs)
            metrics.log_scalar(name, float(value) / num_images, num_images, round=4)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
