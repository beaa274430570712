"""Which expert is responsible for how much of the loss: the paper's rule for what to grow (v5, appendix A)."""

from dataclasses import dataclass
from typing import Any, Iterable

import torch
from fairseq import utils
from fairseq.models import BaseFairseqModel
from torch import Tensor

from fairseq_alma.modules.text.linear_cross_entropy import token_losses


@dataclass(frozen=True)
class ExpertLosses:
    """Sums over one pass through held-out text.

    Attributes:
        losses: one (E,) fp64 tensor per Switch layer: sum of the losses of the tokens that each expert got, in nats.
        counts: one (E,) int64 tensor per Switch layer: number of those tokens.
        num_tokens: tokens in all.
        loss: mean loss per token, in nats.
    """

    losses: list[Tensor]
    counts: list[Tensor]
    num_tokens: int
    loss: float


@torch.no_grad()
def measure_expert_losses(model: BaseFairseqModel, batches: Iterable[dict[str, Any]], pad: int) -> ExpertLosses:
    """Sum up, for every expert of every Switch layer, the losses of the tokens that are routed to it.

    Args:
        model: a Switch language model.
        batches: batches of fairseq's language modeling data.
        pad: index of the padding symbol, whose targets do not count.
    """
    model.eval()
    device = next(model.parameters()).device
    losses: list[Tensor] = []
    counts: list[Tensor] = []
    total, num_tokens = 0.0, 0
    for batch in batches:
        batch = utils.move_to_cuda(batch, device=device) if device.type == "cuda" else batch
        features, extra = model(**batch["net_input"], features_only=True)
        target = batch["target"].flatten()
        real = target != pad
        factors, weight = model.output_factors(features)
        loss = token_losses(factors.flatten(0, -2), weight, target).masked_fill(~real, 0.0).double()
        for layer, routing in enumerate(extra["routing"]):
            num_experts = routing.probs.size(1)
            if len(losses) <= layer:
                losses.append(torch.zeros(num_experts, dtype=torch.double))
                counts.append(torch.zeros(num_experts, dtype=torch.long))
            losses[layer] += torch.bincount(routing.expert, weights=loss, minlength=num_experts).cpu()
            counts[layer] += torch.bincount(routing.expert[real], minlength=num_experts).cpu()
        total += loss.sum().item()
        num_tokens += int(real.sum())
    return ExpertLosses(losses, counts, num_tokens, total / max(num_tokens, 1))
