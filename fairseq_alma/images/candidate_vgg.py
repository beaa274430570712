"""VGG networks of a Firefly growth step. A candidate is a possible split of a channel, or a possible new channel.

`CandidateVGG` has all candidates. `keep_candidates` builds the grown network. Module `firefly` explains the method.

Letters in shapes: B images, I input channels and O output channels of a layer, P new channels of the previous layer, Q
new channels of this layer, T channels of the previous layer that are split, H height, W width, K classes.
"""

from typing import Any, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.images.networks import BATCH_NORM_EPS, VGG, ConvBlock, MemberLinear


class KeptCandidates(NamedTuple):
    """Kept candidates of one layer: indices of the channels to split and of the new channels, both ascending."""

    split: list[int]
    new: list[int]


class Steps(NamedTuple):
    """Step sizes of candidates; small steps change the output of the network only slightly.

    Attributes:
        split: norm of the change d of a split channel's weights w, relative to the norm of w.
        new: norm of a new channel's outgoing weights, relative to the RMS norm of old channels' outgoing weights.
    """

    split: float = 0.2
    new: float = 0.05


DEFAULT_STEPS = Steps()


class CandidateLayer(nn.Module):
    """Base class of layers with candidates; adds weights for the new channels of the previous layer.

    Args:
        weight: weight of the layer without candidates, (O, I, …).
        steps: step sizes of the candidates.
    """

    outgoing: nn.Parameter

    def __init__(self, weight: Tensor, steps: Steps) -> None:
        super().__init__()
        self.weight = weight
        self.outgoing_length = steps.new * (weight.square().sum() / weight.size(1)).sqrt()

    def sample_directions(self, num_directions: int, num_channels: int, generator: Generator) -> nn.Parameter:
        """Return random directions (directions, channels, …) of norm 1; the values do not depend on the device."""
        directions = torch.randn(num_directions, num_channels, *self.weight.shape[2:], generator=generator)
        return nn.Parameter(unit_length(directions).to(self.weight))

    def outgoing_weight(self) -> Tensor:
        """Return the weights for the new channels of the previous layer, (O, P, …)."""
        return (self.outgoing * self.outgoing_length).transpose(0, 1)


class CandidateBlock(CandidateLayer):
    """`ConvBlock` with candidates: P = ``num_new_before`` new input channels, Q = ``num_new`` new output channels."""

    def __init__(self, block: ConvBlock, num_new_before: int, num_new: int, steps: Steps, generator: Generator) -> None:
        super().__init__(block.conv.weight.detach()[0], steps)
        out_channels, in_channels = self.weight.shape[:2]
        self.norm_weight, self.norm_bias = block.norm.weight.detach()[0], block.norm.bias.detach()[0]
        self.new_norm = nn.BatchNorm2d(num_new, affine=False, momentum=None).to(self.weight)
        lengths = self.weight.flatten(1).norm(dim=1)
        self.split_lengths = steps.split * lengths.view(-1, 1, 1, 1)
        self.new_length = lengths.square().mean().sqrt()
        self.split = self.sample_directions(out_channels, in_channels, generator)
        self.new = self.sample_directions(num_new, in_channels, generator)
        self.outgoing = self.sample_directions(num_new_before, out_channels, generator)
        self.set_path(1.0)

    def set_path(self, position: float) -> tuple[Tensor, Tensor]:
        """Set the position of each candidate on its path.

        Returns:
            (positions of splits (O), positions of new channels (Q)); gradients flow to both tensors.
        """
        self.split_path, self.new_path = (
            torch.full_like(each[:, 0, 0, 0], position, requires_grad=True) for each in (self.split, self.new)
        )
        return self.split_path, self.new_path

    def candidate_weights(self) -> tuple[Tensor, Tensor]:
        """Return (change d of each channel's weights (O, I, 3, 3), incoming weights of new channels (Q, I, 3, 3)).

        The norm of a new channel's incoming weights has no effect, because batch norm follows.
        """
        return self.split * self.split_lengths, self.new * self.new_length

    def forward(self, x: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        """Map images, (B, I, H, W), or the output of the previous block, (B, 2 I + P, H, W), to (B, 2 O + Q, H, W)."""
        out_channels, in_channels = self.weight.shape[:2]
        weights = torch.cat([self.weight, *self.candidate_weights()])
        old_before, new_before = join_halves(x, in_channels)
        sizes = [out_channels, len(self.split), len(self.new)]
        old, change, new = F.conv2d(old_before, weights, padding=1).split(sizes, dim=1)
        if len(self.outgoing):
            old = old + F.conv2d(new_before, self.outgoing_weight(), padding=1)
        change = change * self.split_path[:, None, None]
        # Use batch statistics, as in training. They remove a constant shift of a channel, so a shift is not a gain.
        affine = self.norm_weight, self.norm_bias
        halves = [
            F.relu(F.batch_norm(half, None, None, *affine, training=True, eps=BATCH_NORM_EPS))
            for half in (old + change, old - change)
        ]
        new = F.relu(self.new_norm(new)) if len(self.new) else new
        return torch.cat([*halves, new * self.new_path[:, None, None]], dim=1)


class CandidateClassifier(CandidateLayer):
    """Last linear layer, with weights for the new channels of the last convolution."""

    def __init__(self, classifier: MemberLinear, num_new_before: int, steps: Steps, generator: Generator) -> None:
        super().__init__(classifier.weight.detach()[0], steps)
        self.bias = classifier.bias.detach()[0]
        self.outgoing = self.sample_directions(num_new_before, len(self.weight), generator)

    def forward(self, features: Tensor) -> Tensor:
        """Map features (1, B, 2 I + P) to logits (1, B, K)."""
        old, new = join_halves(features[0], self.weight.size(1))
        weight = torch.cat([self.weight, self.outgoing_weight()], dim=1)
        return F.linear(torch.cat([old, new], dim=1), weight, self.bias)[None]


class CandidateVGG(VGG):
    """VGG network with candidates in every layer. The only parameters are the directions (norm 1) of candidates.

    Args:
        network: network of `ConvBlock`s with one member; not modified.
        num_new: number of possible new channels of each convolution.
        generator: random generator for the initial directions, on the CPU.
        steps: step sizes of the candidates.
    """

    def __init__(
        self, network: VGG, num_new: Sequence[int], generator: Generator, steps: Steps = DEFAULT_STEPS
    ) -> None:
        assert network.num_members == 1
        blocks = [
            CandidateBlock(block, new_before, new, steps, generator)
            for block, new_before, new in zip(network.blocks, [0, *num_new[:-1]], num_new, strict=True)
        ]
        sizes = network.image_shape, network.num_classes, network.channels
        super().__init__(*sizes, last_pool=network.last_pool, blocks=blocks)
        self.add_module("classifier", CandidateClassifier(network.classifier, num_new[-1], steps, generator))


def join_halves(x: Tensor, num_old: int) -> tuple[Tensor, Tensor]:
    """Return (mean of the two halves of each old channel, new channels) from the output of the previous layer.

    Max pooling acts on each half separately, so the next layer computes the mean.

    Args:
        x: output of the previous layer (B, 2 I + P, …), or images (B, I, …), which have no halves.
        num_old: number I of old channels.
    """
    if x.size(1) == num_old:
        return x, x[:, num_old:]
    first, second, new = x.split([num_old, num_old, x.size(1) - 2 * num_old], dim=1)
    return (first + second) / 2, new


def unit_length(directions: Tensor) -> Tensor:
    """Scale the direction of each candidate to norm 1; a zero direction remains zero."""
    return F.normalize(directions.flatten(1)).view_as(directions)


@torch.no_grad()
def keep_candidates(network: VGG, candidates: CandidateVGG, growth: Sequence[KeptCandidates]) -> VGG:
    """Return a new network of one member with the kept candidates of each layer.

    The channels of a layer are the old channels, then the second halves of split channels, then the new channels.
    """
    before, state = KeptCandidates([], []), {}
    for number, (old, block, kept) in enumerate(zip(network.blocks, candidates.blocks, growth, strict=True)):
        change, new_weight = block.candidate_weights()
        first_halves = block.weight.clone()
        first_halves[kept.split] += change[kept.split]
        second_halves = block.weight[kept.split] - change[kept.split]
        weight = torch.cat([first_halves, second_halves, new_weight[kept.new]])
        # Weights for the new channels of the previous layer: both halves of a split channel get the weights of this
        # channel; new channels get zeros.
        outgoing = block.outgoing_weight()
        zeros = outgoing.new_zeros(len(kept.new), *outgoing.shape[1:])
        outgoing = torch.cat([outgoing, outgoing[kept.split], zeros])
        state[f"blocks.{number}.conv.weight"] = _widen_inputs(weight, outgoing, before)
        new = block.new_norm.state_dict()  # batch statistics measured by `score_candidates`
        new |= {"weight": torch.ones_like(new["running_mean"]), "bias": torch.zeros_like(new["running_mean"])}
        for name, values in old.norm.state_dict().items():
            state[f"blocks.{number}.norm.{name}"] = torch.cat([values[0], values[0][kept.split], new[name][kept.new]])
        before = kept
    classifier: Any = candidates.classifier
    state["classifier.weight"] = _widen_inputs(classifier.weight, classifier.outgoing_weight(), before)
    state["classifier.bias"] = classifier.bias
    channels = [len(state[f"blocks.{number}.norm.weight"]) for number in range(len(growth))]
    grown = VGG(network.image_shape, network.num_classes, channels, last_pool=network.last_pool)
    grown.to(network.classifier.weight)
    grown.load_state_dict({name: tensor[None] for name, tensor in state.items()})
    return grown.train(network.training)


def _widen_inputs(weight: Tensor, outgoing: Tensor, before: KeptCandidates) -> Tensor:
    """Return the weight of a layer after the previous layer has grown, (O, I + T + kept new channels, …).

    Args:
        weight: weight for the old input channels, (O, I, …).
        outgoing: weight for all new channels of the previous layer, (O, P, …).
        before: kept candidates of the previous layer.
    """
    first_halves = weight.clone()
    first_halves[:, before.split] /= 2
    return torch.cat([first_halves, first_halves[:, before.split], outgoing[:, before.new]], dim=1)
