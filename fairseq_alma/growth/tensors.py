"""Growth of mixtures of experts on plain tensors: the parents, and the source of each expert and gate row.

The methods (paper v5, sections 4.2 and 5, appendix A):

- ``copy``: the paper's for text. An expert's weights and its gate row are copied; the mixture stays flat. The two
  copies then share one softmax mass, so every token's gate value changes: the loss jumps.
- ``split``: the expert's leaf becomes a choice between two equal experts under a new random gate. No token's output
  changes: the loss stays.
- ``scratch``: new random experts with random gate rows, at the root.
"""

from dataclasses import dataclass
from typing import Any, Callable, Mapping, Optional, Sequence

import torch
from torch import Tensor, nn

from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree

EXPERTS, GATE_TENSOR = "experts.", "gate.weight"
"""Parameters of a layer of experts, by their names in it: those that begin so are stacked, (E, …); the gate's rows."""
FIRST_MOMENTS = {"exp_avg", "momentum"}


@dataclass(frozen=True)
class MixtureGrowth:
    """How a mixture of experts grows.

    Attributes:
        old: its tree before.
        new: its tree after.
        expert_source: for each expert of the new layer the old expert that its weights come from; None: random ones.
        row_source: for each row of the new gate the old row; None: a random one.
    """

    old: GateTree
    new: GateTree
    expert_source: tuple[Optional[int], ...]
    row_source: tuple[Optional[int], ...]

    @property
    def copied_rows(self) -> list[int]:
        """Rows of the new gate that repeat another one: where noise may tell the copies apart."""
        return [row for row, source in enumerate(self.row_source) if source in self.row_source[:row]]


def grow_mixture(tree: GateTree, method: str, parents: Sequence[Optional[int]]) -> MixtureGrowth:
    """Plan the growth of one mixture by one expert per parent.

    Args:
        tree: the mixture's tree.
        method: ``copy``, ``split`` or ``scratch``.
        parents: the experts to copy or to split, all different; for ``scratch`` one None for each new expert.
    """
    new = tree
    expert_source: list[Optional[int]] = [*range(tree.num_experts), *parents]
    for new_expert, parent in enumerate(parents, tree.num_experts):
        if parent is None:
            new = GateTree.from_nested([*new.to_nested(), new_expert])
        elif method == "split":
            new = new.with_split(parent, new_expert)
        else:
            new = new.with_sibling(parent, new_expert)
    old_rows = tree.paths()
    row_source: list[Optional[int]] = []
    for path, row in sorted(new.paths().items(), key=lambda item: item[1]):
        source, expert = old_rows.get(path), new.row_expert[row]
        if source is None and method == "copy" and expert is not None and expert_source[expert] is not None:
            source = tree.row_of(expert_source[expert])  # type: ignore[arg-type]
        row_source.append(source)
    return MixtureGrowth(tree, new, tuple(expert_source), tuple(row_source))


def select_experts(losses: Tensor, counts: Tensor, num_new: int, select: str, generator: torch.Generator) -> list[int]:
    """Choose the experts that become parents.

    Args:
        losses: (E,) sum of the losses of the tokens that each expert got, on held-out data (any unit).
        counts: (E,) number of those tokens.
        num_new: how many to choose, at most E.
        select: ``loss`` (largest sums, the paper's rule), ``usage`` (most tokens) or ``random``.
        generator: of the random choice.

    Returns:
        Expert numbers, the first choice first; among equals the lower number first.

    Raises:
        AlmaError: if there are fewer experts than are asked for.
    """
    num_experts = len(losses)
    if num_new > num_experts:
        raise AlmaError(
            f"--experts {num_new}: the layer has {num_experts} experts and each can be copied or split once per step; "
            f"give at most {num_experts}, or grow in several steps"
        )
    if select == "random":
        return torch.randperm(num_experts, generator=generator)[:num_new].tolist()
    scores = losses if select == "loss" else counts
    return torch.argsort(scores, descending=True, stable=True)[:num_new].tolist()


def gather_slices(
    old: Tensor, source: Sequence[Optional[int]], new_slice: Optional[Callable[[int], Tensor]] = None
) -> Tensor:
    """Stack slices of a tensor in a new order.

    Args:
        old: (E, …).
        source: for each slice of the result the slice of ``old``, or None.
        new_slice: gives the slice at a position that has no source; called in ascending order; None: zeros.

    Returns:
        (len(source), …), same precision and device.
    """
    grown = old[[0 if origin is None else origin for origin in source]]
    for position, origin in enumerate(source):
        if origin is None:
            grown[position] = 0 if new_slice is None else new_slice(position)
    return grown


def grow_tensor(
    name: str, old: Tensor, growth: MixtureGrowth, generator: torch.Generator, noise: float = 0.0
) -> Tensor:
    """Grow one parameter of a layer of experts.

    Args:
        name: its name within the layer, `GATE_TENSOR` or one that begins with `EXPERTS`.
        old: its value.
        growth: the plan.
        generator: of new weights (initialised as in a new layer) and noise.
        noise: standard deviation of normal noise on copied gate rows.
    """
    if name != GATE_TENSOR:
        return gather_slices(old, growth.expert_source, lambda _: _new_expert(old[0].shape, generator))
    num_rows, model_dim = growth.new.num_rows, old.size(1)
    bound = (6 / (num_rows + model_dim)) ** 0.5  # Xavier's uniform distribution, as a new gate of this size
    new = gather_slices(
        old, growth.row_source, lambda _: nn.init.uniform_(torch.empty(model_dim), -bound, bound, generator)
    )
    for row in growth.copied_rows if noise > 0 else ():
        new[row] += noise * torch.randn(model_dim, generator=generator).to(new.dtype)
    return new


def _new_expert(shape: torch.Size, generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.zeros(shape)
    return nn.init.xavier_uniform_(torch.empty(shape), generator=generator)


def grow_moments(name: str, entry: Mapping[str, Any], growth: MixtureGrowth, is_shared: bool) -> dict[str, Any]:
    """Grow what an optimizer remembers of one parameter of a layer of experts.

    Copies keep their source's moments, new slices start from zero; other fields, such as the number of steps, stay.
    Adam counts steps for the whole tensor: a new slice's first step is (1 - beta1) / sqrt(1 - beta2) times the learning
    rate, 0.7 times with betas of 0.9 and 0.98.

    Args:
        name: of the parameter within the layer.
        entry: the optimizer's fields.
        growth: the plan.
        is_shared: give the halves of an expert that is split the moments of half of its tokens, see `share_moments`.
    """
    source = growth.row_source if name == GATE_TENSOR else growth.expert_source
    if is_shared and name != GATE_TENSOR:
        entry = share_moments(entry, growth)
    return {
        field: gather_slices(value, source) if torch.is_tensor(value) and value.dim() > 0 else value
        for field, value in entry.items()
    }


def share_moments(entry: Mapping[str, Any], growth: MixtureGrowth) -> dict[str, Any]:
    """Return the moments of stacked experts, before they grow, as those of half of the tokens of each that is split.

    An expert's gradient is a sum over its tokens, G = g_1 + … + g_k. After a split each token goes to either half with
    probability 1/2, so that for a half H, over the choice of its tokens,

        E[H] = G / 2,    E[H²] = G² / 4 + (g_1² + … + g_k²) / 4.

    The first moment m, a mean of G, is therefore halved. The second, v, a mean of G² = signal² + noise, becomes
    signal² / 4 + noise / 2, as the sum of the g_i² is the noise where tokens are independent. Signal² is about m², so

        m -> m / 2,    v -> v / 2 - min(m², v) / 4.

    Muon's ``momentum`` is a first moment too. Other fields stay.
    """
    halved = [source for source in set(growth.expert_source) if growth.expert_source.count(source) > 1]
    shared = dict(entry)
    for field in FIRST_MOMENTS & entry.keys():
        shared[field] = entry[field].clone()
        shared[field][halved] /= 2
    if {"exp_avg", "exp_avg_sq"} <= entry.keys():
        m, v = entry["exp_avg"][halved], entry["exp_avg_sq"][halved]
        shared["exp_avg_sq"] = entry["exp_avg_sq"].clone()
        shared["exp_avg_sq"][halved] = v / 2 - torch.minimum(m * m, v) / 4
    return shared


def grow_optimizer_state(
    state: Mapping[str, Any],
    old: Sequence[str],
    new: Sequence[str],
    grow: Callable[[str, Mapping[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """Return the optimizer's state of the grown model; parameters that are new begin without any.

    Args:
        state: ``last_optimizer_state`` of the checkpoint, of one parameter group: entries by the parameter's number.
        old: names of the old model's parameters, in its order.
        new: the same of the grown model.
        grow: grows the entry of one parameter that the old model has.

    Raises:
        AlmaError: if the state belongs to other parameters.
    """
    (group,) = state["param_groups"] if len(state["param_groups"]) == 1 else ({"params": ()},)
    if len(group["params"]) != len(old):
        raise AlmaError(
            f"--optimizer copy: the checkpoint's optimizer has {len(group['params'])} parameters, its model "
            f"{len(old)}; use --optimizer reset"
        )
    entries = {name: state["state"][number] for number, name in enumerate(old) if number in state["state"]}
    grown = {number: grow(name, entries[name]) for number, name in enumerate(new) if name in entries}
    return {**state, "state": grown, "param_groups": [{**group, "params": [*range(len(new))]}]}
