"""Criterion ``alma_switch_cross_entropy``: cross entropy plus the load-balancing loss of Switch layers."""

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


@dataclass
class AlmaSwitchCrossEntropyConfig(FairseqDataclass):
    """Options of ``alma_switch_cross_entropy``; ``--balance-loss-weight`` is a model option."""

    sentence_avg: bool = II("optimization.sentence_avg")


@register_criterion("alma_switch_cross_entropy", dataclass=AlmaSwitchCrossEntropyConfig)
class AlmaSwitchCrossEntropy(FairseqCriterion):
    """Sum of cross entropy and weighted load-balancing loss (Fedus et al. 2021, section 2.2).

    All metrics are means over the tokens of an update; with ``sentence_avg``, ``loss`` is a mean over sequences. The
    numbers of batches per update and of processes affect only the balance loss and the capacity of experts, which are
    computed for each batch. Metrics:

    - ``loss``: the minimized sum, in bits
    - ``nll_loss``, ``ppl``: the cross entropy in bits, and its perplexity
    - ``balance_loss``: unweighted load-balancing loss, mean over Switch layers; 1 if token shares are equal
    - ``switch{n}_dropped``: share of the tokens that Switch layer n drops
    - ``switch{n}_expert{e}``: share of the tokens routed to expert e of Switch layer n, including dropped tokens
    - ``switch{n}_entropy``: mean entropy of the gate's probabilities in Switch layer n, in nats

    Args:
        task: task that provides the padding index.
        sentence_avg: divide gradients by the number of sequences instead of tokens.
    """

    def __init__(self, task: FairseqTask, sentence_avg: bool) -> None:
        super().__init__(task)
        self.sentence_avg = sentence_avg
        self._compiled: Optional[Callable[..., tuple[Tensor, Sequence[SwitchStatistics]]]] = None

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Return (sum of losses in nats, sample size, log output) of a batch; fairseq divides the sum by the size."""
        if not reduce:
            raise ValueError("alma_switch_cross_entropy requires reduce=True; call token_losses for losses per token")
        if getattr(getattr(model, "decoder", None), "output_projection", None) is None:
            raise AlmaError(
                "--criterion alma_switch_cross_entropy: requires a language model with an output projection; give "
                "--criterion cross_entropy for other language models, or alma_image_cross_entropy for images"
            )
        compute: Any = self._losses
        if model.training and getattr(model, "is_compiled", False):
            # Only two shapes occur: full batches, and the last batch of an epoch.
            compute = self._compiled = self._compiled or torch.compile(self._losses, dynamic=False)
        nll_loss, switch = compute(model, sample["net_input"], sample["target"])
        # len(target) would be wrong for a process without a batch, which gets one row of padding.
        nsentences = sample.get("nsentences", len(sample["target"]))
        sample_size = nsentences if self.sentence_avg else sample["ntokens"]
        loss = nll_loss
        if switch:
            # fairseq divides the loss by the sample size, but the balance loss is already a mean.
            balance_loss = torch.stack([each.balance_loss for each in switch]).sum()
            loss = loss + model.balance_loss_weight * balance_loss * sample_size
        log = {"loss": loss.detach(), "nll_loss": nll_loss.detach(), "ntokens": sample["ntokens"]}
        log |= {"nsentences": nsentences, "sample_size": sample_size}
        for number, each in enumerate(switch):  # sums over tokens, so that fairseq can add the logs of batches
            layer, num_tokens = f"switch{number}", sum(each.routed)
            log |= {f"{layer}_tokens": num_tokens, f"{layer}_balance": each.balance_loss.detach() * num_tokens}
            log |= {f"{layer}_dropped": each.num_dropped, f"{layer}_entropy": each.entropy}
            log |= {f"{layer}_expert{expert:02d}": routed for expert, routed in enumerate(each.routed)}
        return loss, sample_size, log

    def _losses(self, model: Any, inputs: dict[str, Any], target: Tensor) -> tuple[Tensor, Sequence[SwitchStatistics]]:
        """Return (cross entropy of a batch, statistics of each Switch layer); ``--compile`` compiles this method."""
        features, extra = model(**inputs, features_only=True)
        weight, bias = model.decoder.output_projection.weight, getattr(model.decoder, "logit_bias", None)
        nll_loss = linear_cross_entropy(features.flatten(0, 1), weight, target.flatten(), self.padding_idx, bias)
        return nll_loss, extra.get("switch", ())

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Log the metrics, aggregated over batches and processes; called by fairseq."""
        sums = {key: float(sum(log[key] for log in logging_outputs)) for key in logging_outputs[0]}
        sample_size, ntokens, bits = sums["sample_size"], sums["ntokens"], 1 / math.log(2)
        metrics.log_scalar("loss", sums["loss"] / sample_size * bits, sample_size, round=3)
        metrics.log_scalar("nll_loss", sums["nll_loss"] / ntokens * bits, ntokens, round=3)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["nll_loss"].avg))
        routed = {key.removesuffix("_tokens"): sums[key] for key in sums if key.endswith("_tokens")}
        if routed:
            balance = sum(sums[f"{layer}_balance"] / tokens for layer, tokens in routed.items()) / len(routed)
            metrics.log_scalar("balance_loss", balance, ntokens, round=4)
        for layer, tokens in routed.items():
            for key in sorted(key for key in sums if key.startswith(f"{layer}_")):
                if not key.endswith(("_tokens", "_balance")):
                    metrics.log_scalar(key, sums[key] / tokens, tokens, priority=1000, round=4)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
