"""Firefly: grow a VGG network with the candidates that have the best gradient scores (Wu et al. 2020).

A growth step follows section 2 of Wu et al.:

1. Every channel of every layer may be split, and every layer may get new channels. A *split* replaces a channel with
   incoming weights w by two halves with incoming weights w + d and w - d. Each half has half of the outgoing weights,
   so the next layer takes the mean of the halves. A *new* channel has separate incoming weights and small outgoing
   weights. `CandidateVGG` is one network with all candidates; its compute is about three times the compute of the
   network without candidates. A factor moves each candidate along a *path*, from 0 (network without the candidate) to
   1 (network with the candidate).
2. `tune_directions` tunes the *directions* of all candidates (d and the weights of new channels, scaled to norm 1) on
   the images of the stage. The weights of the network do not change.
3. `score_candidates` estimates the change of the loss along each path from the gradient at the middle of the path. At
   the start of a path, the gradient of a split is 0, because the effects of the two halves cancel each other. A
   split changes the loss only to second order.
4. `select_candidates` keeps the best candidates of all layers and adds about the requested number of parameters. The
   released code of the ALMA paper counts neurons instead of parameters.

Each step adds the same share of the *initial* size, so a network grows linearly: "at every growth phase, we add
approximately a quarter of the initial number of parameters" (paper v5, Appendix B.1; section 4 calls this learner FF).

Letters in shapes: B images, I input channels and O output channels of a layer, P new channels of the previous layer, Q
new channels of this layer, T channels of the previous layer that are split, H height, W width, K classes.
"""

import math
from functools import partial
from typing import Any, Callable, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.errors import AlmaError
from fairseq_alma.images.networks import BATCH_NORM_EPS, NUM_CONVOLUTIONS, VGG, ConvBlock, MemberLinear, count_flops

TUNING_RATE = 0.1
FEWEST_NEW = 4  # minimum number of new channels that are candidates in each layer
Batches = Sequence[tuple[Tensor, Tensor]]


class KeptCandidates(NamedTuple):
    """Candidates to keep in one layer: ascending indices of the channels to split, and of the new channels."""

    split: list[int]
    new: list[int]


class CandidateLayer(nn.Module):
    """Base class of layers with candidate channels. Holds the input weights for the new channels of the previous layer.

    Args:
        weight: weight of the layer without candidates, (O, I, …).
        new_step: see `CandidateVGG`.
    """

    outgoing: nn.Parameter

    def __init__(self, weight: Tensor, new_step: float) -> None:
        super().__init__()
        self.weight = weight
        self.outgoing_length = new_step * (weight.square().sum() / weight.size(1)).sqrt()

    def sample_directions(self, num_directions: int, num_channels: int, generator: Generator) -> nn.Parameter:
        """Return random directions of norm 1, (num_directions, num_channels, …), equal on all devices."""
        directions = torch.randn(num_directions, num_channels, *self.weight.shape[2:], generator=generator)
        return nn.Parameter(unit_length(directions).to(self.weight))

    def outgoing_weight(self) -> Tensor:
        """Return the weights for the new channels of the previous layer, (O, P, …)."""
        return (self.outgoing * self.outgoing_length).transpose(0, 1)


class CandidateBlock(CandidateLayer):
    """`ConvBlock` with candidates: P = ``num_new_before`` new input channels, Q = ``num_new`` new output channels."""

    def __init__(
        self,
        block: ConvBlock,
        num_new_before: int,
        num_new: int,
        generator: Generator,
        split_step: float,
        new_step: float,
    ) -> None:
        super().__init__(block.conv.weight.detach()[0], new_step)
        out_channels, in_channels = self.weight.shape[:2]
        self.norm_weight, self.norm_bias = block.norm.weight.detach()[0], block.norm.bias.detach()[0]
        self.new_norm = nn.BatchNorm2d(num_new, affine=False, momentum=None).to(self.weight)
        lengths = self.weight.flatten(1).norm(dim=1)
        self.split_lengths = split_step * lengths.view(-1, 1, 1, 1)
        self.new_length = lengths.square().mean().sqrt()
        self.split = self.sample_directions(out_channels, in_channels, generator)
        self.new = self.sample_directions(num_new, in_channels, generator)
        self.outgoing = self.sample_directions(num_new_before, out_channels, generator)
        self.set_path(1.0)

    def set_path(self, position: float) -> tuple[Tensor, Tensor]:
        """Set all candidates to the same ``position`` on their paths.

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
        # Use batch statistics, as in training, so that a constant shift of a channel does not change the loss.
        affine = self.norm_weight, self.norm_bias
        halves = [
            F.relu(F.batch_norm(half, None, None, *affine, training=True, eps=BATCH_NORM_EPS))
            for half in (old + change, old - change)
        ]
        new = F.relu(self.new_norm(new)) if len(self.new) else new
        return torch.cat([*halves, new * self.new_path[:, None, None]], dim=1)


class CandidateClassifier(CandidateLayer):
    """Last linear layer, with weights for the new channels of the last convolution."""

    def __init__(self, classifier: MemberLinear, num_new_before: int, generator: Generator, new_step: float) -> None:
        super().__init__(classifier.weight.detach()[0], new_step)
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
        num_new: number of new channels that are candidates, for each convolution.
        generator: random generator for the initial directions, on the CPU.
        split_step: norm of the change d of a split channel's weights w, relative to the norm of w. With small steps,
            candidates change the output of the network only slightly.
        new_step: norm of a new channel's outgoing weights, relative to the RMS norm of old channels' outgoing weights.
    """

    def __init__(
        self,
        network: VGG,
        num_new: Sequence[int],
        generator: Generator,
        split_step: float = 0.2,
        new_step: float = 0.05,
    ) -> None:
        blocks = [
            CandidateBlock(block, new_before, new, generator, split_step, new_step)
            for block, new_before, new in zip(network.blocks, [0, *num_new[:-1]], num_new, strict=True)
        ]
        sizes = network.image_shape, network.num_classes, network.channels
        super().__init__(*sizes, last_pool=network.last_pool, blocks=blocks)
        self.add_module("classifier", CandidateClassifier(network.classifier, num_new[-1], generator, new_step))


def join_halves(x: Tensor, num_old: int) -> tuple[Tensor, Tensor]:
    """Average the two halves of each old channel in the input of a layer; return (averages, new channels).

    The averaging is part of the next layer, because max pooling must act on each half first.

    Args:
        x: output of the previous layer (B, 2 I + P, …) with P new channels, or images (B, I, …), which have no halves.
        num_old: number I of old channels.
    """
    if x.size(1) == num_old:
        return x, x[:, num_old:]
    first, second, new = x.split([num_old, num_old, x.size(1) - 2 * num_old], dim=1)
    return (first + second) / 2, new


def unit_length(directions: Tensor) -> Tensor:
    """Return the direction of each candidate, scaled to norm 1; a zero direction remains zero."""
    return F.normalize(directions.flatten(1)).view_as(directions)


@torch.no_grad()
def keep_candidates(network: VGG, candidates: CandidateVGG, growth: Sequence[KeptCandidates]) -> VGG:
    """Return a new network of one member with the kept candidates of each layer.

    Order of a layer's channels: old channels or their first halves, second halves of split channels, new channels.
    """
    before, state = KeptCandidates([], []), {}
    for number, (old, block, kept) in enumerate(zip(network.blocks, candidates.blocks, growth, strict=True)):
        change, new_weight = block.candidate_weights()
        weight = torch.cat([block.weight, block.weight[kept.split] - change[kept.split], new_weight[kept.new]])
        weight[kept.split] += change[kept.split]
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
    halves = weight.clone()
    halves[:, before.split] /= 2
    return torch.cat([halves, halves[:, before.split], outgoing[:, before.new]], dim=1)


class LayerScores(NamedTuple):
    """Scores of one layer's candidates: for each split or new channel, the estimated change of the loss in nats."""

    split: Sequence[float]
    new: Sequence[float]


def vgg_size(image_channels: int, channels: Sequence[int], num_classes: int, share_of: str = "parameters") -> int:
    """Return the number of ``parameters`` or ``neurons`` of a VGG with ``channels[i]`` channels in convolution i."""
    if share_of == "neurons":
        return sum(channels)
    inputs = [image_channels, *channels[:-1]]
    convolutions = sum(9 * before * after for before, after in zip(inputs, channels, strict=True))
    return convolutions + 2 * sum(channels) + (channels[-1] + 1) * num_classes


def select_candidates(
    scores: Sequence[LayerScores], channels: Sequence[int], size_of: Callable[[Sequence[int]], int], num_added: float
) -> list[KeptCandidates]:
    """Return the candidates to keep, for each layer ("greedy selection" in Wu et al. 2020).

    The function adds candidates in ascending order of the score, until the size of the grown network is closest to the
    size before growth plus ``num_added``. ``size_of`` computes the size (parameters or neurons) from the output
    channels of each convolution.
    """
    kept = [KeptCandidates([], []) for _ in scores]
    size = size_of(channels)
    goal = size + num_added
    ranked = sorted(
        (score, layer, kind, index)
        for layer, of_layer in enumerate(scores)
        for kind, of_kind in enumerate(of_layer)
        for index, score in enumerate(of_kind)
    )
    for _, layer, kind, index in ranked:
        kept[layer][kind].append(index)
        before, size = size, size_of([old + sum(map(len, own)) for old, own in zip(channels, kept, strict=True)])
        if size - goal > goal - before:
            kept[layer][kind].pop()
            break
    return [KeptCandidates(sorted(split), sorted(new)) for split, new in kept]


def grow_firefly(
    network: VGG,
    batches: Batches,
    first_channels: int,
    share: float,
    generator: Generator,
    share_of: str = "parameters",
) -> tuple[VGG, int]:
    """Return a larger network with nearly the same output, and the FLOPs of the growth step.

    Args:
        network: trained network of `ConvBlock`s with one member; not modified.
        batches: normalized images (B, C, H, W) and int64 labels (B), on the device of the network.
        first_channels: number of output channels of each convolution before the first growth step.
        share: size to add, as a fraction of the size before the first growth step; 0.25 in the paper.
        generator: random generator for the initial directions, on the CPU.
        share_of: unit of ``share``: ``parameters`` or ``neurons``.

    Returns:
        (grown network, on the device and in the mode of ``network``; FLOPs of the growth step). The parameters are new
        tensors, so the caller must build a new optimizer.

    Raises:
        AlmaError: the share is too small to add a channel, or the loss of the network is NaN or infinite.
    """
    image_channels = network.image_shape[0]
    num_added = amount_to_add(image_channels, first_channels, network.num_classes, share, share_of)
    num_new = [max(FEWEST_NEW, math.ceil(share * first_channels))] * NUM_CONVOLUTIONS
    candidates = CandidateVGG(network, num_new, generator)
    tune_directions(candidates, batches)
    scores = score_candidates(candidates, batches)
    size_of = partial(vgg_size, image_channels, num_classes=network.num_classes, share_of=share_of)
    growth = select_candidates(scores, network.channels, size_of, num_added)
    if not any(kept.split or kept.new for kept in growth):
        raise _too_small(share, num_added, share_of)
    # Each image passes forward and backward twice: to tune the directions, and to compute the scores.
    flops = 2 * sum(len(labels) for _, labels in batches) * count_flops(candidates, network.image_shape).train
    return keep_candidates(network, candidates, growth), flops


def amount_to_add(
    image_channels: int, first_channels: int, num_classes: int, share: float, share_of: str = "parameters"
) -> float:
    """Return the number of parameters or neurons to add. Raises AlmaError if the share is too small."""
    first = [first_channels] * NUM_CONVOLUTIONS
    size_of = partial(vgg_size, image_channels, num_classes=num_classes, share_of=share_of)
    num_added: float = share * size_of(first)
    if share_of == "neurons":
        num_added = round(num_added)
    larger = [[size + (layer == one) for layer, size in enumerate(first)] for one in range(len(first))]
    if min(map(size_of, larger)) - size_of(first) > 2 * num_added:  # adding nothing is closer to the requested size
        raise _too_small(share, num_added, share_of)
    return num_added


def _too_small(share: float, num_added: float, share_of: str) -> AlmaError:
    return AlmaError(
        f"--grow-share {share}: {num_added:.0f} {share_of} are too few to add one channel; give a larger share (the "
        "paper uses 0.25)"
    )


def tune_directions(candidates: CandidateVGG, batches: Batches) -> None:
    """Move the direction of every candidate against the gradient of the loss, in place, once for each batch.

    Each update scales the gradient to norm 1, subtracts `TUNING_RATE` times the scaled gradient from the direction, and
    scales the direction to norm 1.
    """
    directions = [direction for direction in candidates.parameters() if len(direction)]
    for images, labels in batches:
        gradients = torch.autograd.grad(F.cross_entropy(candidates(images)[0], labels), directions)
        with torch.no_grad():
            for direction, gradient in zip(directions, gradients, strict=True):
                direction.copy_(unit_length(direction - TUNING_RATE * unit_length(gradient)))


def score_candidates(candidates: CandidateVGG, batches: Batches) -> list[LayerScores]:
    """Return the score of each candidate: the estimated change of the loss in nats.

    A score is the derivative of the mean loss with respect to the position on the candidate's path, with all
    candidates at the middle of their paths. The score is exact if the loss is linear or quadratic along the path. Wu
    et al. average the gradient over several points of the path instead. The function also measures the batch norm
    statistics of new channels.

    Raises:
        AlmaError: a score is NaN or infinite.
    """
    paths: list[Tensor] = []
    for layer in candidates.blocks:
        layer.new_norm.reset_running_stats()
        paths += layer.set_path(0.5)
    totals, num_images = [torch.zeros_like(path) for path in paths], 0
    for images, labels in batches:
        loss = F.cross_entropy(candidates(images)[0], labels)
        gradients = torch.autograd.grad(loss, paths, materialize_grads=True)
        for total, gradient in zip(totals, gradients, strict=True):
            total += gradient * len(labels)
        num_images += len(labels)
    scores: list[list[float]] = [(total / num_images).tolist() for total in totals]
    if not all(math.isfinite(score) for of_path in scores for score in of_path):
        raise AlmaError("growth: the loss of the network is NaN or infinite; start a new --run with a lower --lr")
    return [LayerScores(split, new) for split, new in zip(scores[::2], scores[1::2], strict=True)]
