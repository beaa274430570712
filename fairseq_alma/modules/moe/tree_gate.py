"""A tree of choices between experts, computed for all experts at once (paper v5, Appendix A, equation 3).

The probability of an expert is the product of the choices on its path. A loop over the choices would take as many
steps as the tree has choices, fifty after fifty growth steps; here one softmax serves all choices, padded to the
largest, and one matrix product adds up the logarithms along all paths.

Letters: B images, I features, R rows of the gate's weight (one for each child of each choice), Q choices, P children
of the largest choice, E experts.
"""

from typing import NamedTuple, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.modules.images.member_layers import draw_as_linear


class TreeRouting(NamedTuple):
    """What a tree of choices decides for B images.

    Attributes:
        probs: (B, E) probability of every expert; rows sum to 1.
        expert: (B) int64, where the best child of every choice leads. Not the expert of largest probability: that one
            may change when a leaf becomes two of half its probability, which growth must not do.
    """

    probs: Tensor
    expert: Tensor


class TreeGate(nn.Module):
    """Choose between experts.

    Args:
        in_features: I.
        tree: the choices.
    """

    slots: Tensor
    slot_of_row: Tensor
    paths: Tensor
    path_lengths: Tensor

    def __init__(self, in_features: int, tree: GateTree) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tree.num_rows, in_features))
        self.bias = nn.Parameter(torch.empty(tree.num_rows))
        self._set_tree(tree)

    def reset_parameters(self, generators: Sequence[Generator]) -> None:
        """Draw initial weights as a linear layer's."""
        draw_as_linear(self.weight, self.bias, *generators)

    def forward(self, x: Tensor) -> TreeRouting:
        """Route (B, I) features."""
        logits = F.pad(F.linear(x, self.weight, self.bias), (0, 1), value=-torch.inf)  # (B, R + 1)
        choices = logits[:, self.slots].unflatten(1, (-1, self.largest_choice))  # (B, Q, P)
        log_probs = F.log_softmax(choices, dim=-1).flatten(1)[:, self.slot_of_row]  # (B, R)
        best = F.one_hot(choices.argmax(dim=-1), self.largest_choice).flatten(1)[:, self.slot_of_row]
        on_best_path = best.to(self.paths.dtype) @ self.paths == self.path_lengths
        return TreeRouting((log_probs @ self.paths).exp(), on_best_path.int().argmax(dim=-1))

    def split(self, expert: int, generator: Generator) -> None:
        """Turn an expert's leaf into a choice between it and a new expert E, with new random rows.

        Every other row stays as it is, so that the two share what the one had: its probability, and as long as they
        compute the same, its output.

        Args:
            expert: number of the expert.
            generator: of the new rows, on the CPU.
        """
        old_tree, old_weight, old_bias = self.tree, self.weight.data, self.bias.data
        tree = old_tree.with_split(expert, old_tree.num_experts)
        weight, bias = torch.empty(tree.num_rows, old_weight.size(1)), torch.empty(tree.num_rows)
        draw_as_linear(weight, bias, generator)
        weight, bias = weight.to(old_weight), bias.to(old_bias)
        paths, old_paths = tree.paths(), old_tree.paths()
        rows, old_rows = [paths[path] for path in old_paths], list(old_paths.values())
        weight[rows], bias[rows] = old_weight[old_rows], old_bias[old_rows]
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self._set_tree(tree)

    def _set_tree(self, tree: GateTree) -> None:
        """Lay out the tree as tensors."""
        self.tree = tree
        self.largest_choice = max(choice.stop - choice.start for choice in tree.choices)
        padding = tree.num_rows
        slots, slot_of_row = [], []
        for number, choice in enumerate(tree.choices):
            rows = list(range(choice.start, choice.stop))
            slots += rows + [padding] * (self.largest_choice - len(rows))
            slot_of_row += [number * self.largest_choice + child for child in range(len(rows))]
        paths = torch.zeros(tree.num_rows, tree.num_experts)
        parents = {row: choice.parent_row for choice in tree.choices for row in range(choice.start, choice.stop)}
        for expert in range(tree.num_experts):
            row: Optional[int] = tree.row_of(expert)
            while row is not None:
                paths[row, expert] = 1
                row = parents[row]
        device = self.weight.device
        for name, tensor in (
            ("slots", torch.tensor(slots)),
            ("slot_of_row", torch.tensor(slot_of_row)),
            ("paths", paths),
            ("path_lengths", paths.sum(dim=0)),
        ):
            self.register_buffer(name, tensor.to(device), persistent=False)
