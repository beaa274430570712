"""``alma_image_classification``: a stage of a stream of images, for fairseq's own commands.

    fairseq-train STREAM --user-dir fairseq_alma --task alma_image_classification --megabatch 3 \\
        --criterion alma_image_cross_entropy --arch alma_mlp --optimizer adadelta --lr 1.0 --max-epoch 100 \\
        --batch-size 128 --cpu
"""

import argparse
import os
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Optional, Sequence

import numpy as np
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II, MISSING
from torch import Tensor

from fairseq_alma.checkpoints import JOINT_MODEL
from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint, starting_checkpoint
from fairseq_alma.checkpoints.ensemble_file import ENSEMBLE_ARCH
from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.errors import AlmaError, in_one_line
from fairseq_alma.images.image_classifier import image_architectures
from fairseq_alma.images.image_dataset import ImageDataset
from fairseq_alma.images.stage_images import ImageInput
from fairseq_alma.learners.schedule import StageOptions, stage_ending_with
from fairseq_alma.training.fairseq_options import bound_options, check_whole_config, fairseq_config
from fairseq_alma.training.loading import check_architecture, check_weights, note_task, refuse_other_weights
from fairseq_alma.training.processes import prepare_group, set_process_defaults
from fairseq_alma.training.whole_split import WholeSplit


@dataclass
class StreamConfig(FairseqDataclass):
    """Where the stream is, and what the command was told elsewhere."""

    data: str = field(default=MISSING, metadata={"help": "the stream, a folder that alma-prep-images has written"})
    seed: int = II("common.seed")
    # Not options: which checkpoint a test was told to load, as ensembles look for their members beside it; and where
    # training starts from, so that a checkpoint that does not fit gets one line before it is loaded.
    path: Optional[str] = II("common_eval.path")
    finetune_from_model: Optional[str] = II("checkpoint.finetune_from_model")
    restore_file: str = II("checkpoint.restore_file")
    save_dir: str = II("checkpoint.save_dir")


AlmaImageClassificationConfig = fairseq_config("AlmaImageClassificationConfig", StreamConfig, [StageOptions])
"""Options of the task."""


@register_task("alma_image_classification", dataclass=AlmaImageClassificationConfig)
class AlmaImageClassificationTask(FairseqTask):
    """Classify the images of a stream.

    Attributes:
        image_shape: (C, H, W).
        num_classes: K.
    """

    def __init__(self, cfg: Any, stream: ImageStream) -> None:
        super().__init__(cfg)
        self.stream = stream
        self.whole_split = WholeSplit(cfg.path is not None)
        self.image_shape: Sequence[int] = stream.shape
        self.num_classes = stream.num_classes
        self.source = ImageInput(stream.mean, stream.std, stream.augment)

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add the task's options to those of a stock command, and preset some of the latter."""
        if isinstance(parser, argparse.ArgumentParser):  # not so when fairseq lists the options of all tasks
            set_process_defaults(parser)
        super().add_args(parser)
        bound_options(parser)

    @classmethod
    @in_one_line()
    def setup_task(cls, cfg: Any, **unused: Any) -> "AlmaImageClassificationTask":
        """Open the stream, once no option of the command is out of range."""
        check_whole_config(cfg)
        stream = ImageStream.open(cfg.data)
        prepare_group({f"{cfg.data}/stream.json": stream.stream.fingerprint})
        note_task("alma_image_classification")
        return cls(cfg, stream)

    @in_one_line()
    def load_dataset(self, split: str, combine: bool = False, **unused: Any) -> None:
        """Load ``train``, ``valid`` (both of the stage) or ``test``; without --megabatch ``valid`` is that of all."""
        self.datasets[split] = ImageDataset(
            self.stream, self._indices(split), self.source, self.cfg.seed, is_training=split == "train"
        )

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> BaseFairseqModel:
        """Build the model, after a look whether it takes images and whether the checkpoint to start from fits it.

        Raises:
            AlmaError: it does not.
        """
        with in_one_line():  # no decorator: fairseq looks at the names of the arguments
            return self._build_checked(cfg, from_checkpoint)

    def _build_checked(self, cfg: Any, from_checkpoint: bool) -> BaseFairseqModel:
        _require_image_model(cfg)
        start = None if from_checkpoint else self._start()
        if start is None:
            model = super().build_model(cfg, from_checkpoint)
            refuse_other_weights(model, str(self.cfg.path))
            return model
        checkpoint = read_checkpoint(start)
        check_architecture(checkpoint, start, cfg)
        model = super().build_model(cfg, from_checkpoint)
        check_weights(checkpoint, start, model)
        return model

    @property
    def checkpoint_path(self) -> Optional[str]:
        """The checkpoint that the command loads, or None."""
        return self.cfg.path

    def valid_step(self, sample: Any, model: Any, criterion: Any, **kwargs: Any) -> tuple[Any, int, dict[str, Any]]:
        """Compute the loss of one batch; see `WholeSplit`."""
        return self.whole_split.score(partial(super().valid_step, sample, model, criterion, **kwargs), sample)

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        """Aggregate the logs of all processes; fairseq calls this once for each split that it tests."""
        super().reduce_metrics(self.whole_split.gathered(logging_outputs), criterion)

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

    def _start(self) -> Optional[str]:
        """Return the checkpoint that training resumes or starts from, or None."""
        last = os.path.join(self.cfg.save_dir, self.cfg.restore_file)
        if os.path.isfile(last):
            return last
        return starting_checkpoint(self.cfg.finetune_from_model, self.cfg.restore_file)

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


def _require_image_model(cfg: Any) -> None:
    """Raise AlmaError if an architecture, or that of a model's members, takes no images."""
    possible = image_architectures()
    option, arch = "--member-arch", cfg.get("member_arch")
    if arch is None:
        option, arch = "--arch", cfg._name
        possible.append(JOINT_MODEL)
    if arch not in (ENSEMBLE_ARCH, *possible):
        raise AlmaError(f"{option} {arch}: takes no images; choose from {', '.join(sorted(possible))}")


@dataclass
class AlmaImageCrossEntropyConfig(FairseqDataclass):
    """It has no options."""


@register_criterion("alma_image_cross_entropy", dataclass=AlmaImageCrossEntropyConfig)
class AlmaImageCrossEntropy(FairseqCriterion):
    """Cross entropy; logged are ``loss`` (nats per image) and ``error`` (share of wrong images, 0 to 1)."""

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Compute the loss of one batch.

        Args:
            model: maps (B, C, H, W) images to (B, K) logits.
            sample: ``net_input`` and ``target`` (B).
            reduce: sum over the batch; else (B) losses.

        Returns:
            Loss in nats; the number of images, which it will be divided by; what to log.
        """
        logits, target = model(**sample["net_input"]), sample["target"]
        loss = F.cross_entropy(logits, target, reduction="sum" if reduce else "none")
        num_images = target.size(0)
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
        """Aggregate the logs of all workers; fairseq calls this."""
        num_images = sum(log["sample_size"] for log in logging_outputs)
        for name, total in (("loss", "loss"), ("error", "num_wrong")):
            value = sum(log[total] for log in logging_outputs)
            metrics.log_scalar(name, float(value) / num_images, num_images, round=4)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Tell fairseq that the logs of workers add up."""
        return True
