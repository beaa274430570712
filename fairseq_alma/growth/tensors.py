"""Growth of mixtures of experts, on plain tensors: selection of experts, growth plans, and grown parameters.

Growth methods (paper v5, sections 4.2 and 5, appendix A):

- ``copy``: the paper's method for text. The new expert has the weights and the gate row of an old expert, and the tree
  remains flat. The softmax has one more entry, so the gate probabilities and the loss change.
- ``split``: a node with the expert and a copy as children replaces the expert. The new gate rows are random. The output
  does not change.
- ``scratch``: the new experts have random weights, and random gate rows at the root.
"""

from dataclasses import dataclass
from typing import Any, Callable, Mapping, Optional, Sequence

import torch
from torch import Tensor, nn

from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree

# Names within a layer of E experts: prefix of the expert parameters of shape (E, …), and name of the gate weight.
EXPERTS, GATE_TENSOR = "experts.", "gate.weight"

_OUTPUTS = ("down_proj", "fc2_weight", "fc2_bias")  # weights of experts that are linear in the output
_STATE_FIELDS = {"step", "exp_avg", "exp_avg_sq", "momentum"}  # of Adam and Muon


@dataclass(frozen=True)
class MixtureGrowth:
    """Growth plan of a mixture of experts.

    Attributes:
        old: gate tree before growth.
        new: gate tree after growth.
        expert_source: for each expert after growth, the old expert to copy; None: random weights.
        row_source: for each gate row after growth, the old row to copy; None: random weights.
    """

    old: GateTree
    new: GateTree
    expert_source: tuple[Optional[int], ...]
    row_source: tuple[Optional[int], ...]


def grow_mixture(tree: GateTree, method: str, parents: Sequence[Optional[int]]) -> MixtureGrowth:
    """Return the growth plan that adds one expert for each element of ``parents``.

    Args:
        tree: gate tree of the mixture.
        method: ``copy``, ``split`` or ``scratch``.
        parents: distinct experts to copy or split; for ``scratch``, one None per new expert.
    """
    new = tree
    expert_source: list[Optional[int]] = [*range(tree.num_experts), *parents]
    for new_expert, parent in enumerate(parents, tree.num_experts):
        if parent is None:
            new = GateTree.from_nested([*new.to_nested(), new_expert])
        else:
            new = new.with_copy(parent, new_expert, method)
    old_rows = tree.paths()
    row_source = [old_rows.get(path) for path in new.paths()]  # in the order of the rows
    for row, expert in enumerate(new.row_expert):
        parent = None if expert is None else expert_source[expert]
        if method == "copy" and row_source[row] is None and parent is not None:
            row_source[row] = tree.row_expert.index(parent)
    return MixtureGrowth(tree, new, tuple(expert_source), tuple(row_source))


def select_experts(
    losses: Sequence[float], counts: Sequence[int], num_new: int, select: str, generator: torch.Generator
) -> list[int]:
    """Select the experts to copy or split.

    Args:
        losses: for each of E experts, the sum of the loss over its held-out tokens, in any unit, such as nats.
        counts: number of held-out tokens of each expert.
        num_new: number of experts to select, at most E.
        select: ``loss`` (largest total losses, the paper's rule), ``usage`` (most tokens) or ``random``.
        generator: random generator for ``random``.

    Returns:
        Numbers of the selected experts; for ``loss`` and ``usage``, the largest value first (ties: smallest number).

    Raises:
        AlmaError: there are fewer than ``num_new`` experts.
    """
    num_experts = len(losses)
    if num_new > num_experts:
        raise AlmaError(
            f"--experts {num_new}: the layer has {num_experts} experts, and a growth step copies or splits each expert "
            f"at most once; give at most {num_experts}, or grow in several steps"
        )
    if select == "random":
        return torch.randperm(num_experts, generator=generator)[:num_new].tolist()
    values = losses if select == "loss" else counts
    return sorted(range(num_experts), key=values.__getitem__, reverse=True)[:num_new]


def gather_slices(
    old: Tensor, source: Sequence[Optional[int]], new_slice: Optional[Callable[[int], Tensor]] = None
) -> Tensor:
    """Return a tensor that stacks copied slices of ``old`` and new slices.

    Args:
        old: tensor with E slices, (E, …).
        source: for each slice of the result, the index of the slice to copy from ``old``; None: a new slice.
        new_slice: function that returns the new slice for a position in the result; None: new slices are zero.

    Returns:
        Tensor (len(source), …) with the dtype and device of ``old``.
    """
    grown = old[[0 if origin is None else origin for origin in source]]
    for position, origin in enumerate(source):
        if origin is None:
            grown[position] = 0 if new_slice is None else new_slice(position)
    return grown


def init_uniform(weight: Tensor, generator: Optional[torch.Generator] = None) -> Tensor:
    """Initialize weights (…, inputs) in place from a uniform distribution with variance 1 / (number of inputs)."""
    bound = (3 / weight.size(-1)) ** 0.5
    return nn.init.uniform_(weight, -bound, bound, generator)


def grow_tensor(
    name: str, old: Tensor, growth: MixtureGrowth, generator: torch.Generator, noise: float = 0.0
) -> Tensor:
    """Grow one parameter of a layer of experts.

    Args:
        name: name of the parameter within the layer: `GATE_TENSOR`, or a name with the prefix `EXPERTS`.
        old: value of the parameter.
        growth: growth plan.
        generator: random generator for the noise and for new weights, which have the distributions of a new model.
        noise: standard deviation of the Gaussian noise that is added to copied gate rows, not to the originals.
    """

    def new_slice(position: int) -> Tensor:
        new = torch.empty(old.shape[1:])
        if name == GATE_TENSOR:  # Xavier's uniform distribution for the shape of the complete gate
            bound = (6 / (growth.new.num_rows + old.size(1))) ** 0.5
            return nn.init.uniform_(new, -bound, bound, generator)
        if new.dim() == 1 or name.endswith("down_proj"):  # biases; outputs of experts without biases
            return nn.init.zeros_(new)
        if name.endswith(("gate_proj", "up_proj")):
            return init_uniform(new, generator)
        return nn.init.xavier_uniform_(new, 1.0, generator)

    if name != GATE_TENSOR:
        grown = gather_slices(old, growth.expert_source, new_slice)
        # Copies of a single expert share its probability 1, so their outputs are multiplied by their number.
        is_shared = growth.new.is_flat and {*growth.expert_source} == {0}
        return grown * len(grown) if is_shared and name.endswith(_OUTPUTS) else grown
    new = gather_slices(old, growth.row_source, new_slice)
    for row, source in enumerate(growth.row_source):
        if noise > 0 and source is not None and source in growth.row_source[:row]:
            new[row] += noise * torch.randn(old.size(1), generator=generator).to(new.dtype)
    return new


def grow_moments(name: str, entry: Mapping[str, Any], growth: MixtureGrowth, is_shared: bool) -> dict[str, Any]:
    """Grow the optimizer state of one parameter of a layer of experts.

    Copied slices get the moments of the source slice, and new slices get zeros. Other fields, such as the number of
    steps, do not change. Adam counts steps per tensor, so bias correction does not restart. The first step of a new
    slice is therefore (1 - beta1) / sqrt(1 - beta2) times the learning rate (0.7 times with betas 0.9 and 0.98).

    With ``is_shared``, a split expert and its copy (the halves) get the expected moments for half of the tokens. The
    gradient of an expert is a sum over k tokens, G = g_1 + … + g_k. After a split, each token goes to either half with
    probability 1/2. The gradient H of a half is then a random variable with

        E[H] = G / 2,    E[H²] = G² / 4 + (g_1² + … + g_k²) / 4.

    The first moment m, a mean of G, is halved; Muon's ``momentum`` is a first moment too. The second moment v is a mean
    of G² = signal² + noise. The new v is signal² / 4 + noise / 2, because the sum of the g_i² equals the noise if
    tokens are independent. Signal² is approximately m², which gives

        m -> m / 2,    v -> v / 2 - min(m², v) / 4.

    Args:
        name: name of the parameter within the layer.
        entry: optimizer state of the parameter.
        growth: growth plan.
        is_shared: whether a split expert and its copy share the moments; moments of gates are always copied.
    """
    source, grown = growth.row_source if name == GATE_TENSOR else growth.expert_source, dict(entry)
    if is_shared and name != GATE_TENSOR:
        halved = [each for each in {*source} if source.count(each) > 1]
        for field in {"exp_avg", "momentum"} & entry.keys():
            grown[field] = entry[field].clone()
            grown[field][halved] /= 2
        if "exp_avg_sq" in entry:
            m, v = entry["exp_avg"][halved], entry["exp_avg_sq"][halved]
            grown["exp_avg_sq"] = entry["exp_avg_sq"].clone()
            grown["exp_avg_sq"][halved] = v / 2 - torch.minimum(m * m, v) / 4
    return {
        field: gather_slices(value, source) if torch.is_tensor(value) and value.dim() > 0 else value
        for field, value in grown.items()
    }


def grow_optimizer_state(
    state: Mapping[str, Any],
    old: Sequence[str],
    new: Sequence[str],
    grow: Callable[[str, Mapping[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """Return the optimizer state of the grown model; new parameters have no state.

    Args:
        state: ``last_optimizer_state`` of the checkpoint, with one parameter group and entries by parameter number.
        old: parameter names of the old model, in the order of the model.
        new: parameter names of the grown model, in the order of the model.
        grow: function that returns the grown state of a parameter, given the name and the old state of the parameter.

    Raises:
        AlmaError: the state is not of Adam or Muon, or its number of parameters differs from the old model.
    """
    (group,) = state["param_groups"] if len(state["param_groups"]) == 1 else ({"params": ()},)
    if len(group["params"]) != len(old):
        raise AlmaError(
            f"--optimizer copy or share: expected optimizer state for the {len(old)} parameters of the model, found "
            f"{len(group['params'])} parameters; use --optimizer reset"
        )
    if unknown := {field for entry in state["state"].values() for field in entry} - _STATE_FIELDS:
        raise AlmaError(
            f"--optimizer copy or share: expected the state of Adam or Muon, found {', '.join(sorted(unknown))}; use "
            "--optimizer reset"
        )
    entries = {name: state["state"][number] for number, name in enumerate(old) if number in state["state"]}
    grown = {number: grow(name, entries[name]) for number, name in enumerate(new) if name in entries}
    return {**state, "state": grown, "param_groups": [{**group, "params": [*range(len(new))]}]}
