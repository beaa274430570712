"""A growth step on a whole checkpoint: weights, configuration, optimizer, and the record of what was done."""

from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Optional, Sequence

import torch
from torch import Size, Tensor

from fairseq_alma.checkpoints import AVERAGE
from fairseq_alma.checkpoints.checkpoint_file import Checkpoint, find_average
from fairseq_alma.checkpoints.maximal_update import BASE_WIDTH
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import format_gate_trees
from fairseq_alma.growth.tensors import (
    EXPERT_TENSORS,
    GATE_TENSOR,
    MixtureGrowth,
    SizeGrowth,
    copied_units,
    enlarge_optimizer_state,
    grow_optimizer_state,
    grow_state,
    grow_tensor,
    renew_units,
    share_moments,
)

RECORD_KEY = "alma_growth"
"""Key of a grown checkpoint: a list of records, one per growth step, plain numbers and strings."""


@dataclass(frozen=True)
class GrowthStep:
    """How a model grows.

    Attributes:
        layers: for each Switch layer, by its name in the model, the plan.
        seed: of new weights and noise.
        noise: standard deviation of the noise on copied gate rows.
        renew_share: of the hidden units of copied experts, which are drawn anew.
        keep_optimizer: grow the optimizer's state too, rather than drop it.
        shares_moments: give the halves of an expert that is split the moments of half of its tokens, not all of them.
    """

    layers: Mapping[str, MixtureGrowth]
    seed: int
    noise: float = 0.0
    renew_share: float = 0.0
    keep_optimizer: bool = False
    shares_moments: bool = False


def grow_checkpoint(
    checkpoint: Checkpoint, step: GrowthStep, shapes: Mapping[str, Size], record: Mapping[str, Any]
) -> Checkpoint:
    """Return a checkpoint of the grown model.

    Args:
        checkpoint: the source; its tensors are taken out one by one as they grow, so that the memory of a large model
            is not needed twice.
        step: what to do.
        shapes: names and shapes of the source model's parameters, in its order.
        record: what to note of this step under `RECORD_KEY`.
    """
    owners = {
        f"{layer}.{name}": (name, growth)
        for layer, growth in step.layers.items()
        for name in (*EXPERT_TENSORS, GATE_TENSOR)
    }

    config = checkpoint["cfg"]["model"]
    widths = config["decoder_embed_dim"] / BASE_WIDTH if config.get("mup") else 1.0
    choice = torch.Generator().manual_seed(step.seed)
    renewed = {
        layer: copied_units(growth, step.renew_share, config["decoder_ffn_embed_dim"], choice)
        for layer, growth in step.layers.items()
        if step.renew_share
    }

    def grow_weights(weights: dict[str, Tensor], order: Sequence[str]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step.seed)  # the same new weights for the model and its average
        grown = {}
        for name in order:
            tensor = weights.pop(name)
            if name in owners:
                part, growth = owners[name]
                tensor = grow_tensor(part, tensor, growth, generator, step.noise, widths)
                renew_units(part, tensor, renewed.get(name.removesuffix(f".{part}"), {}), generator)
            grown[name] = tensor
        return grown

    def grow_moment(name: str, moment: Tensor) -> Tensor:
        if name not in owners:
            return moment
        part, growth = owners[name]
        grown = grow_state(part, moment, growth)
        renew_units(part, grown, renewed.get(name.removesuffix(f".{part}"), {}))
        return grown

    def share_parents(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        if name not in owners:
            return dict(entry)
        part, growth = owners[name]
        return share_moments(part, entry, growth)

    order = list(checkpoint["model"])
    grown = {**checkpoint, "model": grow_weights(checkpoint["model"], order)}
    if (entry := find_average(checkpoint)) is not None:
        entry[AVERAGE] = grow_weights(entry[AVERAGE], [name for name in order if name in entry[AVERAGE]])
    grown["cfg"] = {**checkpoint["cfg"], "model": _grown_config(checkpoint["cfg"]["model"], step)}
    grown[RECORD_KEY] = [*checkpoint.get(RECORD_KEY, []), dict(record)]
    state: Optional[Mapping[str, Any]] = grown.pop("last_optimizer_state", None)
    if step.keep_optimizer:
        if state is None:
            given = "share" if step.shares_moments else "copy"
            raise AlmaError(f"--optimizer {given}: the checkpoint has no optimizer state; use --optimizer reset")
        share = share_parents if step.shares_moments else None
        grown["last_optimizer_state"] = grow_optimizer_state(state, shapes, grow_moment, share)
    return grown


def enlarge_checkpoint(
    checkpoint: Checkpoint,
    growth: SizeGrowth,
    config: Mapping[str, Any],
    names: Iterable[str],
    fresh: Mapping[str, Tensor],
    shapes: tuple[Mapping[str, Size], Mapping[str, Size]],
    record: Mapping[str, Any],
    keep_optimizer: bool,
) -> Checkpoint:
    """Return a checkpoint of a model with more or wider layers, which computes what the source does.

    Args:
        checkpoint: the source; its weights are not altered, and shared where they stay.
        growth: the plan.
        config: ``cfg.model`` of the result.
        names: of the weights of the result, in its order.
        fresh: those of them that come from no old ones.
        shapes: names and shapes of the parameters of the source and of the result, each in its order.
        record: what to note of this step under `RECORD_KEY`.
        keep_optimizer: keep the moments of old layers, rather than drop the optimizer's state.

    Raises:
        AlmaError: there is no optimizer state to keep, or it is of another model.
    """

    def weights_of(old: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        dtype = old["decoder.embed_tokens.weight"].dtype
        grown: dict[str, Tensor] = {}
        shared: dict[int, Tensor] = {}  # input and output embeddings: an average finds them by their place
        for name in names:
            origin, _ = growth.origin(name)
            if origin is None:
                grown[name] = growth.grow(name, None, fresh[name]).to(dtype)
            elif origin in old:
                place = old[origin].data_ptr() if origin == name else None
                grown[name] = shared[place] if place in shared else growth.grow(name, old[origin], None).to(dtype)
                shared |= {} if place is None else {place: grown[name]}
        return grown

    grown = {**checkpoint, "model": weights_of(checkpoint["model"], names)}
    grown["cfg"] = {**checkpoint["cfg"], "model": dict(config)}
    if (entry := find_average(checkpoint)) is not None:
        entry[AVERAGE] = weights_of(entry[AVERAGE], shapes[1])
    grown[RECORD_KEY] = [*checkpoint.get(RECORD_KEY, []), dict(record)]
    state: Optional[Mapping[str, Any]] = grown.pop("last_optimizer_state", None)
    if keep_optimizer:
        if state is None:
            raise AlmaError("--optimizer copy: the checkpoint has no optimizer state; use --optimizer reset")
        grown["last_optimizer_state"] = enlarge_optimizer_state(state, *shapes, growth)
    return grown


def _grown_config(config: Mapping[str, Any], step: GrowthStep) -> dict[str, Any]:
    trees = [growth.new for growth in step.layers.values()]
    return {**config, "num_experts": trees[0].num_experts, "gate_trees": format_gate_trees(trees)}


def growth_table(losses: Mapping[str, Sequence[float]], counts: Mapping[str, Sequence[int]], step: GrowthStep) -> str:
    """Write what was measured and chosen as a table, one line per expert.

    Args:
        losses: for each layer and expert the sum of its tokens' losses in nats; empty if not measured.
        counts: the same for the number of tokens.
        step: what was chosen.
    """
    lines = ["layer | expert | tokens | loss, nats | loss per token | becomes"]
    for layer, growth in step.layers.items():
        for expert in range(growth.old.num_experts):
            children = [new for new, source in enumerate(growth.expert_source) if source == expert]
            becomes = " and ".join(str(child) for child in children) if len(children) > 1 else ""
            figures = "– | – | –"
            if layer in counts:
                tokens, loss = counts[layer][expert], losses[layer][expert]
                figures = f"{tokens:,} | {loss:,.1f} | {loss / tokens:.3f}" if tokens else "0 | 0.0 | no token"
            lines.append(f"{layer} | {expert} | {figures} | {becomes}")
        new_random = [str(new) for new, source in enumerate(growth.expert_source) if source is None]
        if new_random:
            lines.append(f"{layer} | new | – | – | – | {', '.join(new_random)} at random")
    return "\n".join(lines)
