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

    def __init__(self, model_dim: int, tree: GateTree) -> None:
        super().__init__()
        self.tree = tree
        self.weight = nn.Parameter(torch.empty(tree.num_rows, model_dim))
        nn.init.xavier_uniform_(self.weight)

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
        row_log_probs = torch.empty_like(logits)  # log probability of reaching each row from the root
        row, weight = None, None
        for choice in self.tree.choices:
            log_probs = F.log_softmax(logits[:, choice.start : choice.stop], dim=-1)
            best_log_prob, best = log_probs.max(dim=-1)
            if choice.parent_row is None:
                row, weight = best, best_log_prob.exp()
                reach = log_probs
            else:
                here = row == choice.parent_row
                row = torch.where(here, choice.start + best, row)
                weight = torch.where(here, weight * (best_log_prob - best_log_prob.detach()).exp(), weight)
                reach = row_log_probs[:, choice.parent_row, None] + log_probs
            row_log_probs = torch.cat(
                [row_log_probs[:, : choice.start], reach, row_log_probs[:, choice.stop :]], dim=-1
            )
        row_expert = torch.tensor([-1 if e is None else e for e in self.tree.row_expert], device=logits.device)
        leaf_rows = torch.tensor([self.tree.row_of(e) for e in range(self.tree.num_experts)], device=logits.device)
        return Routing(row_expert[row], weight, row_log_probs[:, leaf_rows].exp())

    def extra_repr(self) -> str:
        """Show the tree."""
        return f"tree={self.tree.to_nested()}"
