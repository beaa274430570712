"""Cross entropy of images, with the error rate logged."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor


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
