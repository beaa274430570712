"""Gates (routers) of mixtures of experts, assignment of tokens to experts of limited capacity, and expert losses.

A gate is a tree (`GateTree`). Each inner node is a softmax over its children; a plain gate has one inner node. The gate
in this module, for language models, computes the inner nodes one by one in fp32, without bias. The gate for images,
`images.mixtures.ParallelGate`, computes all inner nodes at once, because its trees can have many inner nodes.

Letters: S tokens (padding included) or images, I features, E experts.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree


class Routing(NamedTuple):
    """Output of a gate.

    Attributes:
        expert: (S,) int64, expert at the end of the path of most probable children. If the tree is not flat, another
            expert may have a larger probability, because a split divides the probability of an expert.
        probs: (S, E) probability of each expert, the product of the probabilities on the path (paper v5, Appendix A,
            equation 3); rows sum to 1.
        combine_weights: factor for the output of ``expert``, (S,), or for the outputs of all experts, (S, E); the
            gradient of the gate flows through these factors.
    """

    expert: Tensor
    probs: Tensor
    combine_weights: Tensor


class DescendingGate(nn.Module):
    """Gate that follows the most probable child at each node, from the root to a leaf.

    A flat tree gives the routing of Fedus et al. 2021, section 2.1: the expert with the largest softmax probability in
    fp32. The combine weight is this probability. In a deeper tree, the combine weight is the probability at the root,
    multiplied by p / stop_gradient(p) for each further node on the path; p is the probability of the selected child.
    This factor is 1, so a split does not change outputs. The gradient of the factor is the gradient of log p.

    Args:
        in_features: I, number of input features.
        tree: gate tree.
    """

    expert_of_row: Tensor
    row_of_expert: Tensor

    def __init__(self, in_features: int, tree: GateTree) -> None:
        super().__init__()
        self.tree = tree
        self.weight = nn.Parameter(torch.empty(tree.num_rows, in_features))
        nn.init.xavier_uniform_(self.weight)
        expert_of_row = [-1 if expert is None else expert for expert in tree.row_expert]
        row_of_expert = [tree.row_expert.index(expert) for expert in range(tree.num_experts)]
        self.register_buffer("expert_of_row", torch.tensor(expert_of_row), persistent=False)
        self.register_buffer("row_of_expert", torch.tensor(row_of_expert), persistent=False)

    def forward(self, x: Tensor) -> Routing:
        """Return the routing of (S, I) tokens, with fp32 probabilities (S, E) and combine weights (S,)."""
        # Use fp32: bf16 is too imprecise for routing decisions (Fedus et al. 2021, section 2.4).
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
        if self.tree.is_flat:
            probs = F.softmax(logits, dim=-1)
            best, expert = probs.max(dim=-1)
            return Routing(expert, probs, best)
        root, *inner = self.tree.nodes
        log_probs = [F.log_softmax(logits[:, root.start : root.stop], dim=-1)]  # of the paths to the rows of a node
        best, row = log_probs[0].max(dim=-1)
        combine_weights = best.exp()
        for node in inner:
            assert node.parent_row is not None  # only the root has no parent row
            here = F.log_softmax(logits[:, node.start : node.stop], dim=-1)
            best, child = here.max(dim=-1)
            passes = row == node.parent_row
            row = torch.where(passes, node.start + child, row)
            combine_weights = torch.where(passes, combine_weights * (best - best.detach()).exp(), combine_weights)
            log_probs.append(torch.cat(log_probs, dim=-1)[:, node.parent_row, None] + here)
        probs = torch.cat(log_probs, dim=-1)[:, self.row_of_expert].exp()
        return Routing(self.expert_of_row[row], probs, combine_weights)


class Dispatch(NamedTuple):
    """Assignment of tokens to experts.

    Attributes:
        tokens: (K,) int64, indices of the K assigned tokens, grouped by expert, ascending within each group.
        counts: number of tokens assigned to each expert; the sum is K.
        routed: number of non-padding tokens that the gate routes to each expert, including tokens over capacity.
    """

    tokens: Tensor
    counts: list[int]
    routed: list[int]


def dispatch_to_experts(routing: Routing, capacity_factor: float = 0.0, padding: Optional[Tensor] = None) -> Dispatch:
    """Assign each token to the expert that the gate selected, unless this expert is full with earlier tokens.

    The capacity is ceil(capacity factor x non-padding tokens / experts) (Fedus et al. 2021, equation 3), at least 1.

    Args:
        routing: routing of S tokens.
        capacity_factor: capacity of an expert, as a multiple of non-padding tokens / experts; 0: no limit.
        padding: (S,) bool, True for padding tokens, which get no expert; None: no padding.
    """
    num_experts = routing.probs.size(1)
    expert = routing.expert if padding is None else routing.expert.masked_fill(padding, num_experts)
    routed = torch.bincount(expert, minlength=num_experts).tolist()[:num_experts]
    num_tokens = limit = sum(routed)
    if capacity_factor > 0:  # rounded first: 1.1 * 10 / 1 is 11.000000000000002, which must not increase the capacity
        limit = max(1, math.ceil(round(capacity_factor * num_tokens / num_experts, 6)))
    by_expert = expert.argsort(stable=True)[:num_tokens].split(routed)
    return Dispatch(torch.cat([each[:limit] for each in by_expert]), [min(each, limit) for each in routed], routed)


@dataclass
class ExpertLosses:
    """Loss of each expert of each layer on held-out data, to select the experts to grow (paper v5, Appendix A).

    Attributes:
        losses: for each layer, loss in nats, summed over the tokens or images of each expert, (E,).
        counts: for each layer, number of tokens or images of each expert, (E,).
    """

    losses: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)

    def add_routed(self, losses: Tensor, routings: Sequence[Routing], is_real: Tensor) -> None:
        """Add a batch in which each layer routes each token to one expert.

        Args:
            losses: (S,) loss of each token, 0 for padding.
            routings: routing of each layer.
            is_real: (S,) bool, False for padding.
        """
        sizes = [(each.expert, each.probs.size(1)) for each in routings]
        sums = [torch.bincount(expert, weights=losses, minlength=size).cpu() for expert, size in sizes]
        self._add(sums, [torch.bincount(expert[is_real], minlength=size).cpu() for expert, size in sizes])

    def add_shared(self, losses: Tensor, shares: Sequence[Tensor]) -> None:
        """Add a batch in which the loss of each image is divided among the experts of each layer.

        Args:
            losses: loss of each image, (S,).
            shares: for each layer, weights of the experts for each image, (S, E); rows sum to 1.
        """
        self._add([losses @ each for each in shares], [each.sum(dim=0) for each in shares])

    def _add(self, sums: list[Tensor], counts: list[Tensor]) -> None:
        self.losses = [before + now for before, now in zip(self.losses, sums, strict=True)] if self.losses else sums
        self.counts = [before + now for before, now in zip(self.counts, counts, strict=True)] if self.counts else counts
