"""Grow a checkpoint: change weights, configuration and optimizer state, and add a record of the growth step."""

import re
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence

import torch
from torch import Tensor

from fairseq_alma.checkpoints import AVERAGE
from fairseq_alma.checkpoints.checkpoint_file import Checkpoint, find_average
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import format_gate_trees, has_experts
from fairseq_alma.growth.tensors import (
    EXPERTS,
    GATE_TENSOR,
    MixtureGrowth,
    grow_moments,
    grow_optimizer_state,
    grow_tensor,
)

RECORD_KEY = "alma_growth"
"""Key in a grown checkpoint. The value is a list of records (dictionaries), one for each growth step."""
_DENSE_WEIGHT = re.compile(r"(?P<mlp>decoder\.layers\.(?P<layer>\d+)\.mlp\.)(?P<kind>gate|up|down)_proj\.weight")


def grow_experts(
    checkpoint: Checkpoint,
    plans: Mapping[str, MixtureGrowth],
    names: Sequence[str],
    record: Mapping[str, Any],
    optimizer: str,
    seed: int,
    noise: float = 0.0,
) -> Checkpoint:
    """Return a checkpoint of the model with additional experts in each Switch layer.

    Args:
        checkpoint: checkpoint to grow, modified in place; ``checkpoint["model"]`` is empty afterwards, to save memory.
        plans: growth plan of each Switch layer, by layer name.
        names: parameter names, in the order of the model.
        record: record of the growth step, added to `RECORD_KEY`.
        optimizer: value of ``alma-grow --optimizer``: ``reset``, ``copy`` or ``share``.
        seed: random seed of new weights and noise.
        noise: standard deviation of the noise on copied gate rows.

    Raises:
        AlmaError: ``optimizer`` is not ``reset``, and the optimizer state is missing or does not fit the model.
    """

    def part_of(name: str) -> tuple[str, Optional[MixtureGrowth]]:
        # (name within the Switch layer, growth plan of the layer), or (name, None) outside of Switch layers
        for layer, growth in plans.items():
            part = name.removeprefix(f"{layer}.")
            if part != name and part.startswith((EXPERTS, GATE_TENSOR)):
                return part, growth
        return name, None

    def grow_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)  # same new weights in the model and the averaged weights
        grown = {}
        for name in list(weights):
            (part, growth), tensor = part_of(name), weights.pop(name)
            grown[name] = tensor if growth is None else grow_tensor(part, tensor, growth, generator, noise)
        return grown

    def grow_entry(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        part, growth = part_of(name)
        return dict(entry) if growth is None else grow_moments(part, entry, growth, optimizer == "share")

    trees = [growth.new for growth in plans.values()]
    config = {"num_experts": trees[0].num_experts, "gate_trees": format_gate_trees(trees)}
    # New weights depend on the order of parameters, so the average needs the order of the model.
    if (entry := find_average(checkpoint)) is not None:
        average = {name: entry[AVERAGE][name] for name in checkpoint["model"] if name in entry[AVERAGE]}
        entry[AVERAGE] = grow_weights(average)
    grown = {**checkpoint, "model": grow_weights(checkpoint["model"])}
    return _complete(grown, config, record, optimizer, (names, names), grow_entry)


def add_layers(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    fresh: Mapping[str, Tensor],
    outputs: tuple[str, ...],
    names: tuple[Sequence[str], Sequence[str]],
    record: Mapping[str, Any],
    optimizer: str,
) -> Checkpoint:
    """Return a checkpoint of the model with new layers after the last layer. The model output does not change.

    Args:
        checkpoint: checkpoint to grow.
        config: option name -> new value, for changed options of ``cfg.model``.
        fresh: random weights of the larger model, by tensor name.
        outputs: name suffixes of the output projections of a layer; these weights are zero in new layers.
        names: (parameter names of the old model, parameter names of the new model), in the order of each model.
        record: record of the growth step, added to `RECORD_KEY`.
        optimizer: ``reset``, or ``copy`` to keep the optimizer state of the old layers.

    Raises:
        AlmaError: ``optimizer`` is not ``reset``, and the optimizer state is missing or does not fit the model.
    """

    def deepen(old: Mapping[str, Tensor], wanted: Iterable[str]) -> dict[str, Tensor]:
        dtype = next(iter(old.values())).dtype
        new = {name: torch.zeros_like(each) if name.endswith(outputs) else each for name, each in fresh.items()}
        return {name: old[name] if name in old else new[name].to(dtype) for name in wanted}

    if (entry := find_average(checkpoint)) is not None:
        entry[AVERAGE] = deepen(entry[AVERAGE], names[1])
    grown = {**checkpoint, "model": deepen(checkpoint["model"], fresh)}
    return _complete(grown, config, record, optimizer, names, lambda _, entry: dict(entry))


def with_one_expert(checkpoint: Checkpoint, names: Sequence[str], every: int) -> tuple[Checkpoint, list[str]]:
    """Replace every n-th MLP of a dense ``alma_transformer_lm`` with a Switch layer: one expert, zero gate weights.

    The result is an intermediate format for `grow_experts`; trained models have no such layers.

    Args:
        checkpoint: checkpoint of the dense model.
        names: parameter names, in the order of the model.
        every: n, the MoE frequency; see `has_experts`.

    Returns:
        (new checkpoint, parameter names of the new checkpoint). Experts have the optimizer state of the replaced MLPs.
    """

    def rename(name: str) -> list[str]:
        # In the order of the model, the new gate precedes the gate projection of the expert.
        match = _DENSE_WEIGHT.fullmatch(name)
        if match is None or not has_experts(int(match["layer"]), every):
            return [name]
        expert = f"{match['mlp']}{EXPERTS}{match['kind']}_proj"
        return [f"{match['mlp']}{GATE_TENSOR}", expert] if match["kind"] == "gate" else [expert]

    def convert(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        converted: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            *gate, new = rename(name)
            converted |= {each: torch.zeros(1, tensor.size(1), dtype=tensor.dtype) for each in gate}
            converted[new] = tensor if new == name else tensor.unsqueeze(0)
        return converted

    def convert_entry(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        if f".{EXPERTS}" not in name:
            return dict(entry)
        return {key: each[None] if torch.is_tensor(each) and each.dim() > 0 else each for key, each in entry.items()}

    new_names = [new for name in names for new in rename(name)]
    cfg = {**checkpoint["cfg"], "model": {**checkpoint["cfg"]["model"], "moe_freq": every}}
    mixture = {**checkpoint, "model": convert(checkpoint["model"]), "cfg": cfg}
    if (entry := find_average(checkpoint)) is not None:
        entry[AVERAGE] = convert(entry[AVERAGE])
    if (state := checkpoint.get("last_optimizer_state")) is not None:
        old_names = [rename(name)[-1] for name in names]
        mixture["last_optimizer_state"] = grow_optimizer_state(state, old_names, new_names, convert_entry)
    return mixture, new_names


def _complete(
    grown: Checkpoint,
    config: Mapping[str, Any],
    record: Mapping[str, Any],
    optimizer: str,
    names: tuple[Sequence[str], Sequence[str]],
    grow: Callable[[str, Mapping[str, Any]], dict[str, Any]],
) -> Checkpoint:
    """Return ``grown`` with new options, a growth record and, unless ``optimizer`` is ``reset``, grown optimizer state.

    `grow_optimizer_state` calls ``grow`` for each parameter. For the other arguments, see `add_layers`.
    """
    state = grown.pop("last_optimizer_state", None)
    if optimizer != "reset":
        if state is None:
            raise AlmaError(f"--optimizer {optimizer}: the checkpoint has no optimizer state; use --optimizer reset")
        grown["last_optimizer_state"] = grow_optimizer_state(state, *names, grow)
    cfg = {**grown["cfg"], "model": {**grown["cfg"]["model"], **config}}
    return {**grown, "cfg": cfg, RECORD_KEY: [*grown.get(RECORD_KEY, []), dict(record)]}


def growth_table(
    losses: Mapping[str, Sequence[float]], counts: Mapping[str, Sequence[int]], plans: Mapping[str, MixtureGrowth]
) -> str:
    """Return a table of measured losses and growth plans: a line per old expert, and one per layer for random experts.

    For each layer, ``losses`` has the summed loss of each expert in nats; ``counts`` has the tokens of each expert.
    Both arguments are empty if the losses were not measured.
    """
    lines = ["layer | expert | tokens | loss, nats | loss per token | becomes"]
    for layer, growth in plans.items():
        for expert in range(growth.old.num_experts):
            children = [str(new) for new, source in enumerate(growth.expert_source) if source == expert]
            figures = "– | – | –"
            if layer in counts:
                tokens, loss = counts[layer][expert], losses[layer][expert]
                figures = f"{tokens:,} | {loss:,.1f} | {loss / tokens:.3f}" if tokens else "0 | 0.0 | –"
            lines.append(f"{layer} | {expert} | {figures} | {' and '.join(children) if len(children) > 1 else ''}")
        if fresh := [str(new) for new, source in enumerate(growth.expert_source) if source is None]:
            lines.append(f"{layer} | new | – | – | – | {', '.join(fresh)} (random weights)")
    return "\n".join(lines)
