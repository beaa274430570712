"""The gate (router) of a Switch layer: which expert a token goes to, and with which weight.

Fedus et al. 2021, section 2.1: softmax over the experts in fp32, then the best one alone; its probability multiplies
the expert's output, so the gate learns. A gate that grew by splitting is a tree of such choices (`GateTree`).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree


class Routing(NamedTuple):
    """A gate's decision for S tokens and E experts.

    Attributes:
        expert: (S,) int64, the expert that each token goes to.
        weight: (S,) fp32, the factor on that expert's output; it carries the gate's gradient.
        probs: (S, E) fp32, probability of every expert; rows sum to 1.
    """

    expert: Tensor
    weight: Tensor
    probs: Tensor


class Gate(nn.Module):
    """Route each token to one expert.

    Args:
        model_dim: size M of a token's representation.
        tree: the choices; the weight matrix has one row for each child of each choice.
    """

    expert_of_row: Tensor
    row_of_expert: Tensor

    def __init__(self, model_dim: int, tree: GateTree) -> None:
        super().__init__()
        self.tree = tree
        self.weight = nn.Parameter(torch.empty(tree.num_rows, model_dim))
        nn.init.xavier_uniform_(self.weight)
        expert_of_row = [-1 if expert is None else expert for expert in tree.row_expert]
        row_of_expert = [tree.row_of(expert) for expert in range(tree.num_experts)]
        self.register_buffer("expert_of_row", torch.tensor(expert_of_row), persistent=False)
        self.register_buffer("row_of_expert", torch.tensor(row_of_expert), persistent=False)

    def forward(self, x: Tensor) -> Routing:
        """Route tokens.

        Args:
            x: (S, M) tokens.
        """
        # fp32 whatever the model's precision: bf16 has too few digits for probabilities that decide (Fedus, 2.4).
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
        return self._route_flat(logits) if self.tree.is_flat else self._route_tree(logits)

    def _route_flat(self, logits: Tensor) -> Routing:
        probs = F.softmax(logits, dim=-1)
        weight, expert = probs.max(dim=-1)
        return Routing(expert, weight, probs)

    def _route_tree(self, logits: Tensor) -> Routing:
        """Descend from the root, at every choice to its best child.

        The factor on the output is the root's probability alone, times p / stop_gradient(p) for every choice below:
        numerically 1, so a split changes no output, yet each choice gets the gradient that a factor p would bring.
        """
        root, *inner = self.tree.choices
        log_probs = [F.log_softmax(logits[:, root.start : root.stop], dim=-1)]  # of reaching each row, choice by choice
        best, row = log_probs[0].max(dim=-1)
        weight = best.exp()
        for choice in inner:
            assert choice.parent_row is not None  # only the root has none
            here = F.log_softmax(logits[:, choice.start : choice.stop], dim=-1)
            best, child = here.max(dim=-1)
            passes = row == choice.parent_row
            row = torch.where(passes, choice.start + child, row)
            weight = torch.where(passes, weight * (best - best.detach()).exp(), weight)
            log_probs.append(torch.cat(log_probs, dim=-1)[:, choice.parent_row, None] + here)
        probs = torch.cat(log_probs, dim=-1)[:, self.row_of_expert].exp()
        return Routing(self.expert_of_row[row], weight, probs)

    def extra_repr(self) -> str:
        """Show the tree."""
        return f"tree={self.tree.to_nested()}"
