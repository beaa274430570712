"""Criterion ``alma_switch_cross_entropy``: cross entropy plus the load-balancing loss of Switch layers.

The cross entropy of a linear output layer is computed in chunks of tokens to save memory: with a vocabulary of 50,000,
the fp32 logits of a batch of 32,768 tokens would take 6.6 GB.

Letters: S tokens, M model dim, V vocabulary size.
"""

import math
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Optional, Sequence

import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from omegaconf import II
from torch import Tensor

from fairseq_alma.errors import AlmaError
from fairseq_alma.moe.switch_layer import SwitchLayer, SwitchStatistics

CHUNK_ELEMENTS = 2**27
"""Maximum number of logits of a chunk (tokens x V), 512 MiB in fp32. Smaller chunks are slower, because each chunk
updates the complete weight gradient."""


class LinearCrossEntropy(torch.autograd.Function):
    """Autograd function of the cross entropy of ``softmax(features @ weight.T + bias)``, summed over tokens.

    This function replaces ``linear_cross_entropy`` of torch 2.13, which rounds the sum of a batch to bf16 in autocast.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, bias: Optional[Tensor], target: Tensor, ignore_index: int
    ) -> Tensor:
        """Return the loss, and save the gradients for `backward`; see `linear_cross_entropy` for the arguments."""
        ignored = target == ignore_index
        index = target.masked_fill(ignored, 0).unsqueeze(1)
        losses, grad_features, grad_weight = [], torch.empty_like(features), None
        for rows in _chunks(features, weight):
            logits = F.linear(features[rows], weight, bias)
            log_probs = logits.float()
            torch.log_softmax(log_probs, dim=1, out=log_probs)  # in place: allocation takes as long as the softmax
            losses.append(log_probs.gather(1, index[rows]).squeeze(1).masked_fill(ignored[rows], 0.0).sum())
            # d loss / d logits = softmax - one-hot. To mask ignored tokens, zero the smaller factor of each product.
            log_probs.exp_().scatter_add_(1, index[rows], torch.full_like(log_probs[:, :1], -1.0))
            grad_logits, mask = log_probs.to(logits.dtype), ignored[rows].unsqueeze(1)
            grad_features[rows] = (grad_logits @ weight).masked_fill_(mask, 0.0)
            product = grad_logits.t() @ features[rows].masked_fill(mask, 0.0)
            grad_weight = product.to(weight.dtype) if grad_weight is None else grad_weight.add_(product)
        ctx.save_for_backward(grad_features, grad_weight)
        return -torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        """Return the gradients from `forward`, multiplied by the incoming gradient."""
        grad_features, grad_weight = ctx.saved_tensors
        return grad_features * grads[0], grad_weight * grads[0], None, None, None


def linear_cross_entropy(
    features: Tensor, weight: Tensor, target: Tensor, ignore_index: int, bias: Optional[Tensor] = None
) -> Tensor:
    """Return the sum over tokens of the cross entropy of ``softmax(features @ weight.T + bias)``.

    Features are (S, M), weights (V, M), targets (S,) int64. The sum excludes tokens with the target ``ignore_index``.
    The sum is in fp32 and in nats. The (V,) bias has no gradient.
    """
    if not torch.is_grad_enabled():
        return token_losses(features, weight, target, bias).masked_fill(target == ignore_index, 0.0).sum()
    return LinearCrossEntropy.apply(features, weight, bias, target, ignore_index)


@torch.no_grad()
def token_losses(features: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """Return the cross entropy of each token, (S,) fp32 in nats; see `linear_cross_entropy` for the arguments."""
    losses = torch.empty(len(features), dtype=torch.float32, device=features.device)
    for rows in _chunks(features, weight):
        losses[rows] = F.cross_entropy(F.linear(features[rows], weight, bias).float(), target[rows], reduction="none")
    return losses


def _chunks(features: Tensor, weight: Tensor) -> Iterator[slice]:
    size = max(1, CHUNK_ELEMENTS // len(weight))
    size = size - size % 128 or size  # matrix products of a GPU work in tiles of 128 rows
    for start in range(0, len(features), size):
        yield slice(start, start + size)


@dataclass
class AlmaSwitchCrossEntropyConfig(FairseqDataclass):
    """Options of ``alma_switch_cross_entropy``, except ``--balance-loss-weight``, which is a model option."""

    sentence_avg: bool = II("optimization.sentence_avg")


@register_criterion("alma_switch_cross_entropy", dataclass=AlmaSwitchCrossEntropyConfig)
class AlmaSwitchCrossEntropy(FairseqCriterion):
    """Sum of cross entropy and weighted load-balancing loss (Fedus et al. 2021, section 2.2).

    Metrics are averaged over the tokens of an update; with ``sentence_avg``, ``loss`` is averaged over sequences. The
    division of an update into batches and processes changes results only through the balance loss and the capacity of
    experts, which are computed for each batch. Metrics:

    - ``loss``: sum of cross entropy and weighted load-balancing loss, in bits
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
        """Return (sum of losses in nats, sample size, log output) of a batch; fairseq divides by the sample size."""
        if not reduce:
            raise ValueError("alma_switch_cross_entropy requires reduce=True; call token_losses for losses per token")
        if getattr(getattr(model, "decoder", None), "output_projection", None) is None:
            raise AlmaError(
                "--criterion alma_switch_cross_entropy: requires a language model with an output projection; give "
                "--criterion cross_entropy for other language models, or alma_image_cross_entropy for images"
            )
        compute: Any = self._losses
        if model.training and getattr(model, "is_compiled", False):
            if self._compiled is None:
                # A compiled graph cannot read token counts on the host. As a decorator, `disable` would add a second to
                # each start of a command, because the call imports torch._dynamo.
                SwitchLayer.forward = torch.compiler.disable(SwitchLayer.forward)  # type: ignore[method-assign]
                # Only two shapes occur: full batches, and the last batch of an epoch.
                self._compiled = torch.compile(self._losses, dynamic=False)
            compute = self._compiled
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
