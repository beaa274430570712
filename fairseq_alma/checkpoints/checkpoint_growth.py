"""A growth step on a checkpoint: weights, configuration, optimizer, and the record of what was done."""

import re
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Mapping, Sequence

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
"""Key of a grown checkpoint: a list of records, one per growth step, plain numbers and strings."""
_DENSE_WEIGHT = re.compile(r"(?P<mlp>decoder\.layers\.(?P<layer>\d+)\.mlp\.)(?P<kind>gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class GrowthStep:
    """How the layers of experts of a model grow.

    Attributes:
        layers: for each layer of experts, by its name in the model, the plan.
        seed: of new weights and noise.
        noise: standard deviation of the noise on copied gate rows.
        optimizer: what becomes of its state: ``reset``, ``copy`` or ``share``, see `alma-grow --optimizer`.
    """

    layers: Mapping[str, MixtureGrowth]
    seed: int
    noise: float = 0.0
    optimizer: str = "reset"

    def part_of(self, name: str) -> tuple[str, MixtureGrowth | None]:
        """Return a parameter's name within its layer of experts, and that layer's plan; None: it does not grow."""
        for layer, growth in self.layers.items():
            part = name.removeprefix(f"{layer}.")
            if part != name and part.startswith((EXPERTS, GATE_TENSOR)):
                return part, growth
        return name, None


def grow_experts(
    checkpoint: Checkpoint, step: GrowthStep, names: Sequence[str], record: Mapping[str, Any]
) -> Checkpoint:
    """Return a checkpoint of the model with more experts.

    Args:
        checkpoint: the source; its tensors are taken out one by one as they grow, so that the memory of a large model
            is not needed twice.
        step: what to do.
        names: of the model's parameters, in its order.
        record: what to note of this step under `RECORD_KEY`.

    Raises:
        AlmaError: an optimizer's state is to be kept, and there is none or one of another model.
    """

    def grow_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step.seed)  # the same new weights for the model and its average
        grown = {}
        for name in list(weights):
            (part, growth), tensor = step.part_of(name), weights.pop(name)
            grown[name] = tensor if growth is None else grow_tensor(part, tensor, growth, generator, step.noise)
        return grown

    def grow_entry(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        part, growth = step.part_of(name)
        return dict(entry) if growth is None else grow_moments(part, entry, growth, step.optimizer == "share")

    trees = [growth.new for growth in step.layers.values()]
    config = {"num_experts": trees[0].num_experts, "gate_trees": format_gate_trees(trees)}
    grown = _with_record(checkpoint, config, record)
    # The average's names are the model's parameters; random numbers are drawn in the order of the model's names.
    if (entry := find_average(checkpoint)) is not None:
        average = {name: entry[AVERAGE][name] for name in checkpoint["model"] if name in entry[AVERAGE]}
        entry[AVERAGE] = grow_weights(average)
    grown["model"] = grow_weights(checkpoint["model"])
    return _with_optimizer(grown, step.optimizer, names, names, grow_entry)


def add_layers(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    fresh: Mapping[str, Tensor],
    outputs: tuple[str, ...],
    names: tuple[Sequence[str], Sequence[str]],
    record: Mapping[str, Any],
    optimizer: str,
) -> Checkpoint:
    """Return a checkpoint of a model with more layers behind the others, which computes the same: they add zero.

    Args:
        checkpoint: the source.
        config: what its ``cfg.model`` has otherwise.
        fresh: random weights of the larger model, by all its names.
        outputs: endings of the names of parameters whose output is added to the residual stream.
        names: of the parameters of the source and of the result, each in its order.
        record: what to note of this step under `RECORD_KEY`.
        optimizer: ``reset``, or ``copy`` to keep what it remembers of the old layers.

    Raises:
        AlmaError: an optimizer's state is to be kept, and there is none or one of another model.
    """

    def deeper(old: Mapping[str, Tensor], wanted: Iterable[str]) -> dict[str, Tensor]:
        dtype = next(iter(old.values())).dtype
        new = {name: torch.zeros_like(each) if name.endswith(outputs) else each for name, each in fresh.items()}
        return {name: old[name] if name in old else new[name].to(dtype) for name in wanted}

    grown = _with_record(checkpoint, config, record)
    grown["model"] = deeper(checkpoint["model"], fresh)
    if (entry := find_average(checkpoint)) is not None:
        entry[AVERAGE] = deeper(entry[AVERAGE], names[1])
    return _with_optimizer(grown, optimizer, *names, lambda _, entry: dict(entry))


def with_one_expert(
    checkpoint: Checkpoint, names: Sequence[str], every: int, factor: float
) -> tuple[Checkpoint, list[str]]:
    """Return a dense ``alma_transformer_lm`` with one expert, whose gate is zero, in every n-th layer.

    No model is built of it: a step that adds experts has to follow.

    Args:
        checkpoint: the source.
        names: of its parameters, in the model's order.
        every: n.
        factor: what the experts' outputs are multiplied with.

    Returns:
        The checkpoint, and the names of its parameters. What the optimizer remembers of a layer is that of its expert.
    """

    def parts_of(name: str) -> list[tuple[str, str]]:
        """Return the new names of what becomes of a parameter, and which part of an expert layer each is."""
        match = _DENSE_WEIGHT.fullmatch(name)
        if match is None or not has_experts(int(match["layer"]), every):
            return [(name, "")]
        expert = (f"{match['mlp']}{EXPERTS}{match['kind']}_proj", match["kind"])
        return [(f"{match['mlp']}{GATE_TENSOR}", "rows"), expert] if match["kind"] == "gate" else [expert]

    def converted(part: str, tensor: Tensor) -> Tensor:
        if part == "rows":
            return torch.zeros(1, tensor.size(1), dtype=tensor.dtype)
        return tensor if not part else (tensor * factor if part == "down" else tensor).unsqueeze(0)

    def converted_all(old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {new: converted(part, old[name]) for name in old for new, part in parts_of(name)}

    def stacked(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        is_moment = {field: torch.is_tensor(value) and value.dim() > 0 for field, value in entry.items()}
        is_expert = f".{EXPERTS}" in name
        return {field: each[None] if is_expert and is_moment[field] else each for field, each in entry.items()}

    new_names = [new for name in names for new, _ in parts_of(name)]
    cfg = {**checkpoint["cfg"], "model": {**checkpoint["cfg"]["model"], "moe_freq": every}}
    mixture = {**checkpoint, "model": converted_all(checkpoint["model"]), "cfg": cfg}
    if (entry := find_average(checkpoint)) is not None:
        entry[AVERAGE] = converted_all(entry[AVERAGE])
    if (state := checkpoint.get("last_optimizer_state")) is not None:
        old_names = [parts_of(name)[-1][0] for name in names]
        mixture["last_optimizer_state"] = grow_optimizer_state(state, old_names, new_names, stacked)
    return mixture, new_names


def _with_record(checkpoint: Checkpoint, config: Mapping[str, Any], record: Mapping[str, Any]) -> Checkpoint:
    cfg = {**checkpoint["cfg"], "model": {**checkpoint["cfg"]["model"], **config}}
    return {**checkpoint, "cfg": cfg, RECORD_KEY: [*checkpoint.get(RECORD_KEY, []), dict(record)]}


def _with_optimizer(
    grown: Checkpoint,
    how: str,
    old: Sequence[str],
    new: Sequence[str],
    grow: Callable[[str, Mapping[str, Any]], dict[str, Any]],
) -> Checkpoint:
    state = grown.pop("last_optimizer_state", None)
    if how != "reset":
        if state is None:
            raise AlmaError(f"--optimizer {how}: the checkpoint has no optimizer state; use --optimizer reset")
        grown["last_optimizer_state"] = grow_optimizer_state(state, old, new, grow)
    return grown


def growth_table(losses: Mapping[str, Sequence[float]], counts: Mapping[str, Sequence[int]], step: GrowthStep) -> str:
    """Return what was measured and chosen as a table, one line per expert.

    Args:
        losses: for each layer and expert the sum of its tokens' losses in nats; empty if not measured.
        counts: the same for the number of tokens.
        step: what was chosen.
    """
    lines = ["layer | expert | tokens | loss, nats | loss per token | becomes"]
    for layer, growth in step.layers.items():
        for expert in range(growth.old.num_experts):
            children = [str(new) for new, source in enumerate(growth.expert_source) if source == expert]
            figures = "– | – | –"
            if layer in counts:
                tokens, loss = counts[layer][expert], losses[layer][expert]
                figures = f"{tokens:,} | {loss:,.1f} | {loss / tokens:.3f}" if tokens else "0 | 0.0 | no token"
            lines.append(f"{layer} | {expert} | {figures} | {' and '.join(children) if len(children) > 1 else ''}")
        if fresh := [str(new) for new, source in enumerate(growth.expert_source) if source is None]:
            lines.append(f"{layer} | new | – | – | – | {', '.join(fresh)} at random")
    return "\n".join(lines)
