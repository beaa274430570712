"""Mixtures of experts for text: gate (router), assignment of tokens to experts, experts, and the Switch layer.

A Switch layer is a sparse feed-forward layer that routes each token to one of E experts (Fedus et al. 2021, "Switch
Transformers", sections 2.1 and 2.2). Capacity and balance loss ignore padding. A gate is a tree (`GateTree`): each
inner node is a softmax over its children; a plain gate has one inner node. The gate in this module computes the inner
nodes one by one in fp32, without bias. The gate for images, `images.mixtures.ParallelGate`, computes all inner nodes
at once, because its trees can have many inner nodes.

Letters: S tokens (padding included) or images, E experts, I features, M model dimension, F hidden size of an expert.
"""

import math
from typing import Callable, NamedTuple, Optional

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


def sum_by_expert(values: Tensor, routing: Routing, is_real: Tensor) -> Tensor:
    """Return the sum of ``values`` over the tokens of each expert, and their number, (2, E) on the CPU.

    ``values`` are (S,), 0 for padding; ``is_real`` (S,) is False for padding.
    """
    weights = torch.stack([values, is_real.to(values.dtype)])
    return torch.stack([torch.bincount(routing.expert, each, routing.probs.size(1)) for each in weights]).cpu()


def grouped_linear(x: Tensor, counts: list[int], weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """Apply a linear layer of its own to each of E groups of consecutive rows.

    Args:
        x: rows of all groups, (K, inputs).
        counts: number of rows of each group; the sum is K.
        weight: (E, outputs, inputs).
        bias: (E, outputs); None: no bias.

    Returns:
        Output (K, outputs).
    """
    if x.is_cuda and torch.is_autocast_enabled("cuda") and not any(size % 8 for size in weight.shape[1:]):
        # One kernel instead of E. Autocast does not cover it, and it exists only for half precision and these sizes.
        dtype = torch.get_autocast_dtype("cuda")
        sizes = torch.tensor(counts).to(x.device, non_blocking=True)
        out = F.grouped_mm(x.to(dtype), weight.to(dtype).transpose(1, 2), offs=sizes.cumsum(0, dtype=torch.int32))
        if bias is not None:  # as a product, because the backward pass of indexing is not deterministic on a GPU
            group = torch.arange(len(bias), device=x.device).repeat_interleave(sizes, output_size=len(x))
            out = out + F.one_hot(group, len(bias)).to(dtype) @ bias.to(dtype)
        return out
    # The backward pass of `unbind` is one stack; the backward pass of indexing would sum E padded tensors.
    groups = zip(x.split(counts), weight.unbind(), [None] * len(weight) if bias is None else bias.unbind(), strict=True)
    return torch.cat([F.linear(*group) for group in groups])


class Experts(nn.Module):
    """Feed-forward networks of equal shape with stacked weights.

    Args:
        num_experts: E, number of experts.
        model_dim: M, model dimension.
        ffn_dim: F, hidden size of each expert.
        gated: True: experts are SwiGLU networks without biases (``gate_proj``, ``up_proj``, ``down_proj``), in which
            ``down_proj`` is initially zero. False: each expert has two linear layers with biases (``fc1``, ``fc2``).
        activation: activation function if ``gated`` is False.
        activation_dropout: dropout probability of hidden activations.
    """

    def __init__(
        self,
        num_experts: int,
        model_dim: int,
        ffn_dim: int,
        gated: bool = False,
        activation: Callable[[Tensor], Tensor] = F.relu,
        activation_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_experts, self.gated = num_experts, gated
        self.activation, self.activation_dropout = activation, activation_dropout
        if gated:
            self.gate_proj = nn.Parameter(torch.empty(num_experts, ffn_dim, model_dim))
            self.up_proj = nn.Parameter(torch.empty(num_experts, ffn_dim, model_dim))
            self.down_proj = nn.Parameter(torch.zeros(num_experts, model_dim, ffn_dim))
            drawn = (self.gate_proj, self.up_proj)
        else:
            self.fc1_weight = nn.Parameter(torch.empty(num_experts, ffn_dim, model_dim))
            self.fc1_bias = nn.Parameter(torch.zeros(num_experts, ffn_dim))
            self.fc2_weight = nn.Parameter(torch.empty(num_experts, model_dim, ffn_dim))
            self.fc2_bias = nn.Parameter(torch.zeros(num_experts, model_dim))
            drawn = (self.fc1_weight, self.fc2_weight)
        for expert in range(num_experts):  # same initialization as a dense layer of fairseq
            for weight in drawn:
                nn.init.xavier_uniform_(weight[expert])

    def forward(self, x: Tensor, dispatch: Dispatch, combine_weights: Tensor) -> Tensor:
        """Apply the assigned expert to each token, and multiply the output by the combine weight.

        Args:
            x: token features, (S, M).
            dispatch: assignment of tokens to experts.
            combine_weights: factor for each token, (S,) fp32.

        Returns:
            Output (S, M) with the dtype of ``x``; zero for tokens without an expert.
        """
        rows, counts = x[dispatch.tokens], dispatch.counts
        if self.gated:
            gate_proj, up_proj, *last = self.parameters()
            hidden = F.silu(grouped_linear(rows, counts, gate_proj)) * grouped_linear(rows, counts, up_proj)
        else:
            fc1_weight, fc1_bias, *last = self.parameters()
            hidden = self.activation(grouped_linear(rows, counts, fc1_weight, fc1_bias))
        hidden = F.dropout(hidden, self.activation_dropout, self.training)
        out = grouped_linear(hidden, counts, *last) * combine_weights[dispatch.tokens].unsqueeze(1)
        return x.new_zeros(x.shape).index_copy(0, dispatch.tokens, out.to(x.dtype))


class SwitchStatistics(NamedTuple):
    """Statistics of a Switch layer for one batch.

    Attributes:
        balance_loss: unweighted load-balancing loss, scalar fp32 with gradient: E x sum over experts of (token share)
            x (mean probability); 1 if balanced (Fedus et al. 2021, equations 4 to 6).
        routed: number of non-padding tokens routed to each expert, including tokens over capacity.
        num_dropped: number of non-padding tokens over capacity.
        entropy: entropy of the gate's probabilities in nats, summed over non-padding tokens, scalar fp32.
    """

    balance_loss: Tensor
    routed: list[int]
    num_dropped: int
    entropy: Tensor


class SwitchLayer(nn.Module):
    """Mixture of experts that routes each token to one expert and scales the output by the gate's combine weight.

    Args:
        model_dim: M, model dimension.
        ffn_dim: F, hidden size of each expert.
        tree: gate tree; `GateTree.flat(E)` for a plain Switch layer.
        capacity_factor: capacity of an expert in training, as a multiple of non-padding tokens / experts; 0: no limit.
        eval_capacity_factor: capacity factor in evaluation; with 0 (no limit), results do not depend on the batch.
        activation, activation_dropout, gated: see `Experts`.
    """

    def __init__(
        self,
        model_dim: int,
        ffn_dim: int,
        tree: GateTree,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 0.0,
        activation: Callable[[Tensor], Tensor] = F.relu,
        activation_dropout: float = 0.0,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.gate = DescendingGate(model_dim, tree)
        self.experts = Experts(tree.num_experts, model_dim, ffn_dim, gated, activation, activation_dropout)
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor

    def forward(self, x: Tensor, padding: Optional[Tensor] = None) -> tuple[Tensor, Routing, SwitchStatistics]:
        """Apply the layer without a residual connection. A full expert processes no further tokens.

        Args:
            x: token features, (S, M).
            padding: (S,) bool, True for padding tokens; None: no padding.

        Returns:
            (output (S, M), routing, statistics); the output is zero for padding and for tokens over capacity.
        """
        routing = self.gate(x)
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        dispatch = dispatch_to_experts(routing, factor, padding)
        out = self.experts(x, dispatch, routing.combine_weights)
        probs = routing.probs if padding is None else routing.probs.masked_fill(padding.unsqueeze(1), 0.0)
        num_tokens = sum(dispatch.routed)
        per_token = 1.0 / max(num_tokens, 1)
        shares = torch.tensor(dispatch.routed, dtype=probs.dtype, device=probs.device) * per_token
        balance_loss = probs.size(1) * torch.dot(shares, probs.sum(0) * per_token)
        entropy = torch.special.entr(probs.detach()).sum()
        num_dropped = num_tokens - sum(dispatch.counts)
        return out, routing, SwitchStatistics(balance_loss, dispatch.routed, num_dropped, entropy)
