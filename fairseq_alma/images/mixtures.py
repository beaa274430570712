"""Mixtures of experts for images: gate, layers, fully connected network, growth (paper v5, section 4.2, Appendix A).

With a ``soft`` gate, a layer returns the mean of the expert outputs, weighted by the gate's probabilities. With a
``hard`` gate, a layer returns the output of one expert for each image: in training, an expert sampled from the
probabilities, with the straight-through gradient (Bengio et al. 2013); in evaluation, the expert in `Routing.expert`.
Training computes all experts in one operation. Evaluation with a hard gate computes only the selected experts.

Each hidden layer (fully connected) or convolution (VGG) of a network is a mixture. Such a network has one member,
because members with different gate trees cannot be stacked. A growth step (Algorithm 2) selects the expert with the
largest validation loss in each layer. The method ``split`` replaces this expert by two equal experts below a new random
gate node; the loss does not change. The method ``copy`` copies the expert and the expert's row of a flat gate (paper
v1, section 5.2); the loss changes.

Letters: B images, I input features or channels, O output features or channels, E experts, H height, W width; R rows of
the gate weight (one for each child of each inner node), Q inner nodes, P maximum number of children of a node.
"""

import itertools
import math
from typing import Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.growth.tensors import MixtureGrowth, gather_slices, grow_mixture
from fairseq_alma.images.networks import (
    BATCH_NORM_EPS,
    ImageNetwork,
    MemberBatchNorm2d,
    MemberConv2d,
    MemberLinear,
    in_chunks,
    init_as_linear,
    reset_parameters,
)
from fairseq_alma.moe import Routing, dispatch_to_experts


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
        """Return the routing of (B, I) features; the combine weights are the (B, E) probabilities."""
        logits = F.pad(F.linear(x, self.weight, self.bias), (0, 1), value=-torch.inf)  # (B, R + 1)
        by_node = logits[:, self.slots]  # (B, Q, P)
        log_probs = F.log_softmax(by_node, dim=-1).flatten(1)[:, self.slot_of_row]  # (B, R)
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
        self.tree = tree
        rows = [torch.arange(node.start, node.stop) for node in tree.nodes]
        slots = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tree.num_rows)
        on_path = torch.eye(tree.num_rows)  # (R, R) row r has the rows on the path to the child of row r
        for node in tree.nodes[1:]:  # parents come before their children
            on_path[node.start : node.stop] += on_path[node.parent_row]
        leaves = [tree.row_expert.index(expert) for expert in range(tree.num_experts)]
        paths = on_path[leaves].T.contiguous()
        slot_of_row = (slots < tree.num_rows).flatten().nonzero().flatten()
        tensors = {"slots": slots, "slot_of_row": slot_of_row, "paths": paths, "path_lengths": paths.sum(dim=0)}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.to(self.weight.device), persistent=False)


class MixtureLayer(nn.Module):
    """Mixture of experts with a gate tree; a subclass defines the experts.

    The gate's input is the layer input (B, I), or the channel means of a layer input (B, I, H, W).

    Args:
        in_features: I, number of input features of the gate.
        tree: gate tree.
        gate: ``soft`` or ``hard``.

    Attributes:
        routing: routing of the last batch, without gradient; see `shares`.
    """

    routing: Routing

    def __init__(self, in_features: int, tree: GateTree, gate: str) -> None:
        super().__init__()
        self.gate = ParallelGate(in_features, tree)
        self.is_hard = gate == "hard"

    @property
    def num_experts(self) -> int:
        return self.gate.tree.num_experts

    def forward(self, x: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        """Return the layer output for a batch. In training, a hard gate samples experts; see `sample_experts`."""
        routing = self.gate(x.mean(dim=(2, 3)) if x.dim() == 4 else x)
        self.routing = Routing(*(each.detach() for each in routing))
        if not self.is_hard:
            return self.combine(self.all_experts(x), routing.combine_weights)
        if self.training:
            one_hot = F.one_hot(sample_experts(routing.probs, *generators), self.num_experts).to(routing.probs.dtype)
            return self.combine(self.all_experts(x), one_hot + routing.probs - routing.probs.detach())
        if self.num_experts == 1:
            return self.one_expert(x, 0)
        by_expert, counts, _ = dispatch_to_experts(routing)
        parts = x[by_expert].split(counts)
        outputs = [self.one_expert(part, number) for number, part in enumerate(parts) if part.size(0)]
        return torch.cat(outputs)[by_expert.argsort()]

    def reset_parameters(self, generators: Sequence[Generator]) -> None:
        init_as_linear(self.gate.weight, self.gate.bias, *generators)
        for module in self.expert_modules():
            reset_parameters(module, [*generators] * self.num_experts)

    def shares(self) -> Tensor:
        """Return the weight of each expert for each image of the last batch, (B, E); rows sum to 1."""
        if self.is_hard:
            return F.one_hot(self.routing.expert, self.num_experts).to(self.routing.probs.dtype)
        return self.routing.probs

    def grow(self, expert: int, generator: Generator, method: str = "split") -> None:
        """Add an expert as a copy of ``expert``; see `ParallelGate.grow` for the arguments.

        ``split`` does not change the layer's output. ``copy`` can change the output and the probabilities.
        """
        growth = self.gate.grow(expert, generator, method)
        for module in self.expert_modules():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                grown = gather_slices(tensor.detach(), growth.expert_source)
                setattr(module, name, nn.Parameter(grown) if isinstance(tensor, nn.Parameter) else grown)

    def expert_modules(self) -> list[nn.Module]:
        """Return the modules with stacked expert tensors (first dimension E): all children except the gate."""
        return [module for module in self.children() if module is not self.gate]

    def all_experts(self, x: Tensor) -> Tensor:
        """Return the (B, E, …) outputs of all experts for a batch of images."""
        raise NotImplementedError

    def one_expert(self, x: Tensor, expert: int) -> Tensor:
        raise NotImplementedError

    def combine(self, outputs: Tensor, combine_weights: Tensor) -> Tensor:
        """Return the sum over experts of the (B, E, …) outputs, weighted by the (B, E) weights."""
        return torch.einsum("be,be...->b...", combine_weights, outputs)


@torch.no_grad()
def sample_experts(probs: Tensor, generator: Optional[Generator] = None) -> Tensor:
    """Return an expert for each image, (B,) int64, sampled from (B, E) probabilities.

    ``generator`` must be on the CPU, so that samples do not depend on the device; None: torch's global generator.
    """
    noise = torch.rand(probs.size(0), 1, generator=generator).to(probs.device)
    return (probs.float().cumsum(dim=1) <= noise).sum(dim=1).clamp(max=probs.size(1) - 1)


class MixtureLinear(MixtureLayer):
    """Mixture of experts that maps (B, I) to (B, O). Each expert is a linear layer with ReLU."""

    def __init__(self, in_features: int, out_features: int, tree: GateTree, gate: str) -> None:
        super().__init__(in_features, tree, gate)
        self.linear = MemberLinear(tree.num_experts, in_features, out_features)

    def all_experts(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x)).transpose(0, 1)

    def one_expert(self, x: Tensor, expert: int) -> Tensor:
        return F.relu(F.linear(x, self.linear.weight[expert], self.linear.bias[expert]))

    def combine(self, outputs: Tensor, combine_weights: Tensor) -> Tensor:
        return torch.bmm(combine_weights[:, None], outputs)[:, 0]


class MixtureConv(MixtureLayer):
    """Mixture of experts that maps (B, I, H, W) to (B, O, H, W). Each expert has a convolution, batch norm and ReLU."""

    def __init__(self, in_channels: int, out_channels: int, tree: GateTree, gate: str) -> None:
        super().__init__(in_channels, tree, gate)
        self.conv = MemberConv2d(tree.num_experts, in_channels, out_channels)
        self.norm = MemberBatchNorm2d(tree.num_experts, out_channels)

    def all_experts(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x))).unflatten(1, (self.num_experts, -1))

    def one_expert(self, x: Tensor, expert: int) -> Tensor:
        norm = self.norm
        out = F.conv2d(x, self.conv.weight[expert], padding=1)
        scale = norm.weight[expert] * (norm.running_var[expert] + BATCH_NORM_EPS).rsqrt()
        shift = norm.bias[expert] - norm.running_mean[expert] * scale
        return F.relu(out * scale[:, None, None] + shift[:, None, None])


class MixtureMLP(ImageNetwork):
    """Fully connected network with a hidden layer for each gate tree; each expert of a layer has ``width`` neurons."""

    def __init__(
        self, image_shape: Sequence[int], num_classes: int, width: int, trees: Sequence[GateTree], gate: str
    ) -> None:
        super().__init__(num_members=1)
        sizes = itertools.pairwise([math.prod(image_shape)] + [width] * len(trees))
        self.blocks = nn.ModuleList(
            MixtureLinear(before, after, tree, gate) for (before, after), tree in zip(sizes, trees, strict=True)
        )
        self.classifier = MemberLinear(1, width, num_classes)

    def member_logits(self, images: Tensor, generators: Sequence[Generator]) -> Tensor:
        x = images.flatten(-3).flatten(0, -2)  # (B, I) from (B, C, H, W) or (1, B, C, H, W)
        for block in self.blocks:
            x = block(x, generators)
        return self.classifier(x)


def mixture_layers(network: nn.Module) -> list[MixtureLayer]:
    """Return the mixture layers of a network, from input to output."""
    return [module for module in network.modules() if isinstance(module, MixtureLayer)]


@torch.no_grad()
def measure_expert_losses(network: ImageNetwork, images: Tensor, labels: Tensor) -> list[Tensor]:
    """Return, for each layer, the loss of each expert, summed over the images that the gate assigns to the expert.

    Losses are (E,), in nats; they select the experts to grow (paper v5, Appendix A). Soft gates divide the loss of an
    image among the experts in proportion to the gate's probabilities. The network stays in evaluation mode.
    """
    network.eval()
    sums = [torch.zeros((), device=images.device)] * len(mixture_layers(network))
    chunks = in_chunks(images)
    for some, classes in zip(chunks, labels.split([len(chunk) for chunk in chunks]), strict=True):
        losses = F.cross_entropy(network(some)[0], classes, reduction="none")
        sums = [total + losses @ layer.shares() for total, layer in zip(sums, mixture_layers(network), strict=True)]
    return sums


def grow_losing_experts(
    network: ImageNetwork, images: Tensor, labels: Tensor, generator: Generator, method: str = "split"
) -> list[int]:
    """Split or copy the expert with the largest loss in each layer, in place. Return the indices of these experts."""
    losing = [int(losses.argmax()) for losses in measure_expert_losses(network, images, labels)]
    for layer, expert in zip(mixture_layers(network), losing, strict=True):
        layer.grow(expert, generator, method)
    return losing
