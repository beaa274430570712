"""What one growth step does to one mixture of experts: which experts become parents, and where every row comes from.

The methods (paper v5, sections 4.2 and 5, appendix A):

- ``copy``: the paper's for text. An expert's weights and its gate row are copied; the mixture stays flat. The two
  copies then share one softmax mass, so every token's gate value changes: the loss jumps.
- ``split``: the expert's leaf becomes a choice between two equal experts under a new random gate. No token's output
  changes: the loss stays.
- ``scratch``: new random experts with random gate rows, at the root.
"""

from dataclasses import dataclass
from typing import Optional, Sequence

import torch
from torch import Tensor

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
