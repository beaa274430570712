"""What a growth step does to mixtures of experts, on plain tensors: who is a parent, and where every row comes from.

The methods (paper v5, sections 4.2 and 5, appendix A):

- ``copy``: the paper's for text. An expert's weights and its gate row are copied; the mixture stays flat. The two
  copies then share one softmax mass, so every token's gate value changes: the loss jumps.
- ``split``: the expert's leaf becomes a choice between two equal experts under a new random gate. No token's output
  changes: the loss stays.
- ``scratch``: new random experts with random gate rows, at the root.

Stacked experts and gate rows grow by it, and the optimizer's state of both. fairseq numbers an optimizer's parameters
in the order of ``model.parameters()``. With ``--fp16`` or ``--bf16`` it keeps one flat fp32 vector for all of them
(unless ``--fp16-no-flatten-grads``), and its optimizer sees that vector as a single parameter.
"""

from dataclasses import dataclass
from typing import Any, Callable, Mapping, Optional, Protocol, Sequence

import torch
from torch import Size, Tensor, nn

from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree


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
    new, sources = tree, list(range(tree.num_experts))
    expert_source: list[Optional[int]] = [*sources, *parents]
    for new_expert, parent in enumerate(parents, tree.num_experts):
        if method == "scratch" or parent is None:
            new = GateTree.from_nested([*new.to_nested(), new_expert])
        elif method == "split":
            new = new.with_split(parent, new_expert)
        else:
            new = new.with_sibling(parent, new_expert)
    return MixtureGrowth(tree, new, tuple(expert_source), _row_sources(tree, new, method, expert_source))


def _row_sources(
    old: GateTree, new: GateTree, method: str, expert_source: Sequence[Optional[int]]
) -> tuple[Optional[int], ...]:
    """Return where each gate row comes from: its own place in the old tree, the copied expert's row, or nowhere."""
    old_rows = old.paths()
    sources: list[Optional[int]] = []
    for path, row in sorted(new.paths().items(), key=lambda item: item[1]):
        source = old_rows.get(path)
        expert = new.row_expert[row]
        if source is None and method == "copy" and expert is not None:
            parent = expert_source[expert]
            source = None if parent is None else old.row_of(parent)
        sources.append(source)
    return tuple(sources)


def select_experts(losses: Tensor, counts: Tensor, num_new: int, select: str, generator: torch.Generator) -> list[int]:
    """Choose the experts that become parents.

    Args:
        losses: (E,) sum of the losses of the tokens that each expert got, on held-out data (any unit).
        counts: (E,) number of those tokens.
        num_new: how many to choose, at most E.
        select: ``loss`` (largest sums, the paper's rule), ``usage`` (most tokens), ``worst`` (largest loss of
            a token on average) or ``random``.
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
    scores = {"loss": losses, "usage": counts, "worst": losses / counts.clamp(min=1)}[select]
    return torch.argsort(scores, descending=True, stable=True)[:num_new].tolist()


EXPERT_TENSORS = ("experts.fc1_weight", "experts.fc1_bias", "experts.fc2_weight", "experts.fc2_bias")
GATE_TENSOR = "gate.weight"

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")


class SizeGrowth(Protocol):
    """How a decoder gets more layers (`sizes.DepthGrowth`) or wider ones (`sizes.WidthGrowth`)."""

    def origin(self, name: str) -> tuple[Optional[str], bool]:
        """Return the old name of a parameter, None if it has none, and whether its layer is new."""

    def grow(self, name: str, old: Optional[Tensor], fresh: Optional[Tensor]) -> Tensor:
        """Return a parameter of the larger model, of the old one or of fresh weights."""

    def grow_moment(self, name: str, field: str, old: Tensor) -> Tensor:
        """Return a moment of a parameter that is not of a new layer."""


NewSlice = Callable[[int], Tensor]
"""Returns the content of the slice at a position, on the CPU."""
GrowState = Callable[[str, Tensor], Tensor]
"""Takes a parameter's name and one of its moments, in the parameter's shape, and returns the grown moment."""

ShareMoments = Callable[[str, Mapping[str, Any]], dict[str, Any]]
"""Takes a parameter's name and all that the optimizer remembers of it, and returns that with other moments."""


def gather_slices(old: Tensor, source: Sequence[Optional[int]], new_slice: Optional[NewSlice] = None) -> Tensor:
    """Stack slices of a tensor in a new order.

    Args:
        old: (E, …).
        source: for each slice of the result the slice of ``old``, or None.
        new_slice: gives the slices that have no source; called in ascending order of their positions.

    Returns:
        (len(source), …), same precision and device.
    """
    grown = old[[0 if origin is None else origin for origin in source]]
    for position, origin in enumerate(source):
        if origin is None:
            assert new_slice is not None
            grown[position] = new_slice(position)
    return grown


def grow_tensor(
    name: str,
    old: Tensor,
    growth: MixtureGrowth,
    generator: torch.Generator,
    noise: float = 0.0,
    widths: float = 1.0,
) -> Tensor:
    """Grow one parameter of a Switch layer.

    Args:
        name: its name within the layer, one of `EXPERT_TENSORS` or `GATE_TENSOR`.
        old: its value.
        growth: the plan.
        generator: of new weights and noise.
        noise: standard deviation of normal noise on copied gate rows.
        widths: of the model with ``--mup``, which scales what is random (`maximal_update.scale_first_weights`).
    """
    if name != GATE_TENSOR:
        return gather_slices(old, growth.expert_source, lambda _: widths * _new_expert(old.shape[1:], generator))
    num_rows, model_dim = growth.new.num_rows, old.size(1)
    bound = (
        6 * widths / (num_rows + model_dim)
    ) ** 0.5  # as a new gate of this size starts: Xavier's uniform distribution
    new = gather_slices(
        old, growth.row_source, lambda _: nn.init.uniform_(torch.empty(model_dim), -bound, bound, generator)
    )
    for row in growth.copied_rows if noise > 0 else ():
        new[row] += noise * torch.randn(model_dim, generator=generator).to(new.dtype)
    return new


def _new_expert(shape: Size, generator: torch.Generator) -> Tensor:
    """Initialise one new expert's weights or bias as a new layer has them."""
    if len(shape) == 1:
        return torch.zeros(shape)
    return nn.init.xavier_uniform_(torch.empty(shape), generator=generator)


def grow_state(name: str, old: Tensor, growth: MixtureGrowth) -> Tensor:
    """Grow the optimizer's moments of one parameter: copies keep their source's, new slices start from zero.

    Adam counts its steps for the whole tensor, and so corrects a new slice's moments as little as the old ones': the
    slice's first step is (1 - beta1) / sqrt(1 - beta2) times the learning rate, 0.7 times with betas of 0.9 and 0.98.
    """
    source = growth.row_source if name == GATE_TENSOR else growth.expert_source
    return gather_slices(old, source, lambda _: torch.zeros(old.shape[1:]))


def copied_units(growth: MixtureGrowth, share: float, ffn_dim: int, generator: torch.Generator) -> dict[int, Tensor]:
    """Choose the hidden units of each copied expert that are to be drawn anew (drop-upcycling, Nakamura et al. 2025).

    Args:
        growth: the plan.
        share: of the units.
        ffn_dim: units of an expert.
        generator: of the choice.
    """
    sources = growth.expert_source
    copies = [expert for expert, source in enumerate(sources) if source is not None and source in sources[:expert]]
    return {expert: torch.randperm(ffn_dim, generator=generator)[: round(share * ffn_dim)] for expert in copies}


def renew_units(
    name: str, grown: Tensor, units: Mapping[int, Tensor], generator: Optional[torch.Generator] = None
) -> None:
    """Draw hidden units of some experts anew, in place: normal, with mean and deviation of the expert's weights.

    Args:
        name: of the parameter within the layer; the bias behind the units has none, and stays.
        grown: the parameter, or a moment of it.
        units: for each expert which of its units.
        generator: of the weights; None: they become zero, as moments do.
    """
    axis = {"experts.fc1_weight": 0, "experts.fc1_bias": 0, "experts.fc2_weight": 1}.get(name)
    if axis is None:
        return
    for expert, chosen in units.items():
        own = grown[expert]
        drawn = torch.zeros_like(own.index_select(axis, chosen))
        if generator is not None:
            drawn += own.mean() + own.std() * torch.randn(drawn.shape, generator=generator).to(drawn)
        own.index_copy_(axis, chosen, drawn)


def share_moments(name: str, entry: Mapping[str, Any], growth: MixtureGrowth) -> dict[str, Any]:
    """Return Adam's moments of one parameter as they are for experts that will share their tokens with a sibling.

    An expert's gradient is a sum over its tokens, G = g_1 + … + g_k. After a split each token goes to either half with
    probability 1/2, so that for a half H, over the choice of its tokens,

        E[H] = G / 2,    E[H²] = G² / 4 + (g_1² + … + g_k²) / 4.

    The first moment m, a mean of G, is therefore halved. The second, v, a mean of G² = signal² + noise, becomes
    signal² / 4 + noise / 2, because the sum of the g_i² is the noise where tokens are independent, and small beside G²
    where they agree. Adam knows both: signal² is about m² (a little less, as m still has some noise in it), so that

        m -> m / 2,    v -> v / 2 - min(m², v) / 4,

    which lies between v / 4 (all signal: the halves go on with the step that the expert made) and v / 2 (all noise:
    their steps are smaller by the root of 2, as is right for half of a batch). Experts that are not split, and rows of
    gates, keep theirs.

    Args:
        name: of the parameter within the layer.
        entry: the optimizer's fields; ``exp_avg`` and ``exp_avg_sq`` have the parameter's old shape.
        growth: the plan.

    Raises:
        AlmaError: these are not Adam's moments.
    """
    if name == GATE_TENSOR:
        return dict(entry)
    if not all(torch.is_tensor(entry.get(field)) for field in ADAM_MOMENTS):
        raise AlmaError(
            "--optimizer share: the checkpoint's optimizer has no moments of Adam's; train with --optimizer adam, or "
            "use --optimizer reset"
        )
    halved = [source for source in set(growth.expert_source) if growth.expert_source.count(source) > 1]
    first, second = (entry[field].clone() for field in ADAM_MOMENTS)
    m, v = first[halved], second[halved]
    first[halved] = m / 2
    second[halved] = v / 2 - torch.minimum(m * m, v) / 4
    return {**entry, **dict(zip(ADAM_MOMENTS, (first, second), strict=True))}


def grow_optimizer_state(
    state: Mapping[str, Any], shapes: Mapping[str, Size], grow: GrowState, share: Optional[ShareMoments] = None
) -> dict[str, Any]:
    """Grow the moments of every parameter.

    Args:
        state: ``last_optimizer_state`` of the checkpoint.
        shapes: names and shapes of the old model's parameters, in its order.
        grow: grows one moment.
        share: changes the moments of one parameter before they grow; None: nothing.

    Returns:
        The same structure for the grown model, whose parameters have the same order.

    Raises:
        AlmaError: if the state belongs to other parameters.
    """
    entries = state.get("state", {})
    names = _names_of(entries, shapes)
    if share is not None and len(entries) != len(shapes):
        raise AlmaError("--optimizer share: the checkpoint has one vector for all parameters; use --optimizer copy")
    grown = {}
    for index, (key, entry) in enumerate(sorted(entries.items())):
        before = entry if share is None else share(names[index][0], entry)
        grown[key] = {field: _grow_field(value, names[index], shapes, grow) for field, value in before.items()}
    return {**state, "state": grown}


def _grow_field(value: Any, names: Sequence[str], shapes: Mapping[str, Size], grow: GrowState) -> Any:
    """Grow one field of one entry; the number of steps, for instance, is no moment and stays."""
    if not _is_moment(value):
        return value
    moments = [grow(name, moment) for name, moment in _split(value, names, shapes).items()]
    return moments[0] if len(names) == 1 else torch.cat([moment.flatten() for moment in moments])


def _names_of(entries: Mapping[Any, Any], shapes: Mapping[str, Size]) -> Sequence[Sequence[str]]:
    """Return the parameters of each entry of an optimizer's state: one each, or all in the only one."""
    if len(entries) == len(shapes):
        return [[name] for name in shapes]
    if len(entries) == 1:
        return [list(shapes)]
    raise AlmaError(
        f"--optimizer copy: the checkpoint's optimizer has {len(entries)} parameters, its model {len(shapes)}; "
        "use --optimizer reset"
    )


def _is_moment(value: Any) -> bool:
    return torch.is_tensor(value) and value.dim() > 0


def _split(moment: Tensor, names: Sequence[str], shapes: Mapping[str, Size]) -> dict[str, Tensor]:
    """Return the moment of each parameter of an entry, in the parameter's shape."""
    numels = [shapes[name].numel() for name in names]
    if moment.numel() != sum(numels):
        raise AlmaError(
            f"--optimizer copy: a moment of {moment.numel()} values found for parameters of {sum(numels)}; "
            "use --optimizer reset"
        )
    parts = moment.flatten().split(numels)
    return {name: part.view(shapes[name]) for name, part in zip(names, parts, strict=True)}


def enlarge_optimizer_state(
    state: Mapping[str, Any], shapes: Mapping[str, Size], new_shapes: Mapping[str, Size], growth: SizeGrowth
) -> dict[str, Any]:
    """Return the optimizer's state of a larger model: old layers keep their moments, new ones begin with none.

    Args:
        state: ``last_optimizer_state`` of the checkpoint.
        shapes: names and shapes of the old model's parameters, in its order.
        new_shapes: those of the larger model.
        growth: the plan.

    Raises:
        AlmaError: the state belongs to other parameters.
    """
    entries = [entry for _, entry in sorted(state.get("state", {}).items())]
    names = _names_of(dict(enumerate(entries)), shapes)
    fields = [field for field, value in entries[0].items() if _is_moment(value)]
    moments: dict[str, dict[str, Tensor]] = {field: {} for field in fields}
    for entry, of_entry in zip(entries, names, strict=True):
        for field in fields:
            moments[field] |= _split(entry[field], of_entry, shapes)

    def moment_of(name: str, field: str) -> Tensor:
        origin, is_new = growth.origin(name)
        if is_new or origin is None:
            return torch.zeros(new_shapes[name], dtype=entries[0][field].dtype)
        return growth.grow_moment(name, field, moments[field][origin])

    grown = [{**entries[0], **{field: moment_of(name, field) for field in fields}} for name in new_shapes]
    if len(entries) != len(shapes):
        flat = {field: torch.cat([entry[field].flatten() for entry in grown]) for field in fields}
        grown = [{**entries[0], **flat}]
    groups = [dict(group) for group in state.get("param_groups", ())]
    if len(groups) == 1:
        groups[0]["params"] = [*range(len(grown))]
    return {**state, "state": dict(enumerate(grown)), "param_groups": groups}
