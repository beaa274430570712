"""Cross entropy plus the load-balancing loss of Switch layers, with what the layers did logged per layer."""

import math
from dataclasses import dataclass
from typing import Any, Callable, Optional, Sequence

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from omegaconf import II
from torch import Tensor

from fairseq_alma.errors import AlmaError
from fairseq_alma.moe.switch_layer import SwitchStatistics
from fairseq_alma.text.linear_cross_entropy import linear_cross_entropy

LayerLog = dict[str, Any]


@dataclass
class AlmaSwitchCrossEntropyConfig(FairseqDataclass):
    """Options; the balance loss's weight belongs to the model (``--balance-loss-weight``)."""

    sentence_avg: bool = II("optimization.sentence_avg")


@register_criterion("alma_switch_cross_entropy", dataclass=AlmaSwitchCrossEntropyConfig)
class AlmaSwitchCrossEntropy(FairseqCriterion):
    """Sum of the tokens' cross entropy and of the weighted balance loss (Fedus et al. 2021, section 2.2).

    Logged in base 2, as fairseq does: ``loss`` (what is minimised), ``nll_loss`` (the cross entropy alone), ``ppl``
    (from ``nll_loss`` alone). Logged as they are: ``balance_loss`` (mean over Switch layers, 1 when balanced,
    unweighted), and per Switch layer n ``switch{n}_dropped`` and ``switch{n}_expert{e}`` (shares of the tokens) and
    ``switch{n}_entropy`` (mean entropy of the gate's probabilities, nats). All of them are means over the tokens of an
    update, whatever batches and processes had them; the balance loss, as capacity, is that of each batch.

    Args:
        task: gives the padding index.
        sentence_avg: normalise gradients by sequences rather than by tokens.
    """

    def __init__(self, task: FairseqTask, sentence_avg: bool) -> None:
        super().__init__(task)
        self.sentence_avg = sentence_avg
        self._compiled: Optional[Callable[..., tuple[Tensor, Sequence[SwitchStatistics]]]] = None

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, LayerLog]:
        """Compute the loss of one batch.

        Args:
            model: a language model of this package.
            sample: ``net_input``, ``target`` (B, T), ``ntokens`` and ``nsentences``.
            reduce: must be True; sums are all that is computed.

        Returns:
            Loss summed over tokens in nats; the sample size that it will be divided by; what to log.
        """
        if not reduce:
            raise ValueError("alma_switch_cross_entropy computes sums only; for per-token losses call token_losses")
        if getattr(getattr(model, "decoder", None), "output_projection", None) is None:
            raise AlmaError(
                "--criterion alma_switch_cross_entropy: made for language models with an output projection; give "
                "--criterion cross_entropy for other language models, alma_image_cross_entropy for images"
            )
        compute = self._losses
        if model.training and getattr(model, "is_compiled", False):
            if self._compiled is None:
                self._compiled = torch.compile(self._losses, dynamic=False)  # shapes are few: whole batches, a last one
            compute = self._compiled
        nll_loss, switch = compute(model, sample["net_input"], sample["target"])
        # not the rows of a batch: a process that has none left for an update gets one of padding
        nsentences = sample.get("nsentences", len(sample["target"]))
        sample_size = nsentences if self.sentence_avg else sample["ntokens"]
        loss = nll_loss
        if switch:
            # fairseq divides the loss by the sample size; the balance loss is a mean already.
            balance_loss = torch.stack([each.balance_loss for each in switch]).sum()
            loss = loss + model.balance_loss_weight * balance_loss * sample_size
        log = {
            "loss": loss.detach(),
            "nll_loss": nll_loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": nsentences,
            "sample_size": sample_size,
        }
        for layer, statistics in enumerate(switch):
            log |= _layer_log(f"switch{layer}", statistics)
        return loss, sample_size, log

    def _losses(self, model: Any, inputs: dict[str, Any], target: Tensor) -> tuple[Tensor, Sequence[SwitchStatistics]]:
        """Return the cross entropy of a batch, and what its Switch layers did: the part that may be compiled."""
        features, extra = model(**inputs, features_only=True)
        weight, bias = model.decoder.output_projection.weight, getattr(model.decoder, "logit_bias", None)
        nll_loss = linear_cross_entropy(features.flatten(0, 1), weight, target.flatten(), self.padding_idx, bias)
        return nll_loss, extra.get("switch", ())

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[LayerLog]) -> None:
        """Aggregate the logs of all workers; fairseq calls this."""
        sums = {key: float(sum(log[key] for log in logging_outputs)) for key in logging_outputs[0]}
        bits = 1 / math.log(2)
        sample_size, ntokens = sums["sample_size"], sums["ntokens"]
        metrics.log_scalar("loss", sums["loss"] / sample_size * bits, sample_size, round=3)
        metrics.log_scalar("nll_loss", sums["nll_loss"] / ntokens * bits, ntokens, round=3)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["nll_loss"].avg))
        layers = sum(key.endswith("_tokens") for key in sums)
        if not layers:
            return
        routed = {key.removesuffix("_tokens"): sums[key] for key in sums if key.endswith("_tokens")}
        balance = sum(sums[f"{layer}_balance"] / tokens for layer, tokens in routed.items()) / layers
        metrics.log_scalar("balance_loss", balance, ntokens, round=4)
        for layer, tokens in routed.items():
            for key in sorted(key for key in sums if key.startswith(f"{layer}_")):
                if not key.endswith(("_tokens", "_balance")):
                    metrics.log_scalar(key, sums[key] / tokens, tokens, priority=1000, round=4)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Tell fairseq that summing the logs before `reduce_metrics` gives the same result."""
        return True


def _layer_log(layer: str, statistics: SwitchStatistics) -> LayerLog:
    """Return sums over tokens, so that logs of several batches add up; shares are taken in `reduce_metrics`."""
    num_tokens = sum(statistics.routed)
    return {
        f"{layer}_tokens": num_tokens,
        f"{layer}_balance": statistics.balance_loss.detach() * num_tokens,
        f"{layer}_dropped": statistics.num_dropped,
        f"{layer}_entropy": statistics.entropy,
        **{f"{layer}_expert{expert:02d}": routed for expert, routed in enumerate(statistics.routed)},
    }
