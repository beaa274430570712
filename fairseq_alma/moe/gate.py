"""Gates (routers) of mixtures of experts, assignment of tokens to experts of limited capacity, and expert losses.

A gate is a tree (`GateTree`). Each inner node is a softmax over its children; a plain gate has one inner node. There
are two implementations:

- `DescendingGate`, for the Switch layers of language models, computes the inner nodes one by one in fp32, without bias.
- `ParallelGate`, for images, computes all inner nodes at once, because its trees can have many inner nodes.

Letters: S tokens (padding included) or images, I features, R rows of the gate weight (one for each child of each
inner node), Q inner nodes, P maximum number of children of a node, E experts.
"""

import math
from dataclasses import dataclass, field
from typing import Iterable, NamedTuple, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.growth.tensors import MixtureGrowth, gather_slices, grow_mixture


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


class ParallelGate(nn.Module):
    """Gate that computes all nodes at once, with one padded softmax and one matrix product.

    The matrix product sums log-probabilities along the path of each expert. The combine weights are the probabilities.
    The caller initializes the weights.

    Args:
        in_features: I, number of input features.
        tree: gate tree.
    """

    slots: Tensor  # (Q, P) rows of each node, padded with R
    slot_of_row: Tensor  # (R,) position of each row in the flattened slots
    paths: Tensor  # (R, E) 1 if the row is on the path of the expert
    path_lengths: Tensor  # (E,) number of rows on the path of each expert

    def __init__(self, in_features: int, tree: GateTree) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tree.num_rows, in_features))
        self.bias = nn.Parameter(torch.empty(tree.num_rows))
        self._set_tree(tree)

    def forward(self, x: Tensor) -> Routing:
        """Return the routing of (S, I) features; the combine weights are the (S, E) probabilities."""
        logits = F.pad(F.linear(x, self.weight, self.bias), (0, 1), value=-torch.inf)  # (S, R + 1)
        by_node = logits[:, self.slots]  # (S, Q, P)
        log_probs = F.log_softmax(by_node, dim=-1).flatten(1)[:, self.slot_of_row]  # (S, R)
        best = F.one_hot(by_node.argmax(dim=-1), by_node.size(-1)).flatten(1)[:, self.slot_of_row]
        on_best_path = best.to(self.paths.dtype) @ self.paths == self.path_lengths
        probs = (log_probs @ self.paths).exp()
        return Routing(on_best_path.int().argmax(dim=-1), probs, probs)

    def grow(self, expert: int, generator: Generator, method: str = "split") -> MixtureGrowth:
        """Add an expert with the next free number, E, as a copy of ``expert``.

        Args:
            expert: number of the expert to copy.
            generator: random generator for new rows, on the CPU.
            method: ``split`` replaces the leaf of ``expert`` with a node over both experts, which has random rows.
                ``copy`` adds a copy of the row of ``expert`` to the same node.

        Returns:
            Growth plan, with the source of each expert and each row.
        """
        growth = grow_mixture(self.tree, method, [expert])
        weight, bias = torch.empty(growth.new.num_rows, self.weight.size(1)), torch.empty(growth.new.num_rows)
        init_as_linear(weight, bias, generator)
        self.weight = nn.Parameter(gather_slices(self.weight.detach(), growth.row_source, weight.__getitem__))
        self.bias = nn.Parameter(gather_slices(self.bias.detach(), growth.row_source, bias.__getitem__))
        self._set_tree(growth.new)
        return growth

    def _set_tree(self, tree: GateTree) -> None:
        """Set the gate tree, and the buffers that represent it as index tensors."""
        self.tree = tree
        largest_node = max(node.stop - node.start for node in tree.nodes)
        slots = torch.full((len(tree.nodes), largest_node), tree.num_rows)
        slot_of_row: list[int] = []
        for number, node in enumerate(tree.nodes):
            num_children = node.stop - node.start
            slots[number, :num_children] = torch.arange(node.start, node.stop)
            slot_of_row += [number * largest_node + child for child in range(num_children)]
        paths = torch.zeros(tree.num_rows, tree.num_experts)
        parents = {row: node.parent_row for node in tree.nodes for row in range(node.start, node.stop)}
        for expert in range(tree.num_experts):
            row: Optional[int] = tree.row_expert.index(expert)
            while row is not None:
                paths[row, expert] = 1
                row = parents[row]
        tensors = {"slots": slots, "slot_of_row": torch.tensor(slot_of_row), "paths": paths}
        for name, tensor in {**tensors, "path_lengths": paths.sum(dim=0)}.items():
            self.register_buffer(name, tensor.to(self.weight.device), persistent=False)


def init_as_linear(weight: Tensor, bias: Tensor, generator: Generator) -> None:
    """Initialize weight (O, I) and bias (O,) in place: uniform in ±1 / sqrt(I), as in ``torch.nn.Linear``."""
    bound = 1 / math.sqrt(weight.size(-1))
    nn.init.uniform_(weight, -bound, bound, generator=generator)
    nn.init.uniform_(bias, -bound, bound, generator=generator)


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


def dispatch_tokens(routing: Routing, capacity_factor: float, padding: Optional[Tensor] = None) -> Dispatch:
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

    def add_routed(self, losses: Tensor, routings: Iterable[Routing], is_real: Tensor) -> None:
        """Add a batch in which each layer routes each token to one expert.

        Args:
            losses: (S,) loss of each token, 0 for padding.
            routings: routing of each layer.
            is_real: (S,) bool, False for padding.
        """
        sums, counts = [], []
        for routing in routings:
            num_experts = routing.probs.size(1)
            sums.append(torch.bincount(routing.expert, weights=losses, minlength=num_experts).cpu())
            counts.append(torch.bincount(routing.expert[is_real], minlength=num_experts).cpu())
        self._add(sums, counts)

    def add_shared(self, losses: Tensor, shares: Sequence[Tensor]) -> None:
        """Add a batch in which the loss of each image is divided among the experts of each layer.

        Args:
            losses: loss of each image, (S,).
            shares: for each layer, weights of the experts for each image, (S, E); rows sum to 1.
        """
        self._add([losses @ each for each in shares], [each.sum(dim=0) for each in shares])

    def _add(self, sums: list[Tensor], counts: list[Tensor]) -> None:
        if not self.losses:
            self.losses, self.counts = sums, counts
            return
        self.losses = [before + now for before, now in zip(self.losses, sums, strict=True)]
        self.counts = [before + now for before, now in zip(self.counts, counts, strict=True)]
