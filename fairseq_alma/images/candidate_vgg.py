"""A VGG network with all candidates that Firefly may add to it, and the network with those that are kept.

`firefly` chooses them. Letters: B images, I input and O output channels of a layer, P and Q new channels of the layer
before and of this one, T and S channels that are split there and here, H and W height and width, K classes.
"""

from typing import Iterator, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.images.networks import (
    BATCH_NORM_EPS,
    SMALLEST_IMAGE,
    VGG,
    ConvBlock,
    MemberBatchNorm2d,
    MemberLinear,
)


class KeptCandidates(NamedTuple):
    """The candidates of one layer that are kept.

    Attributes:
        split: channels that become two, in ascending order.
        new: numbers of new channels, in ascending order.
    """

    split: list[int]
    new: list[int]


_NOTHING = KeptCandidates([], [])


class Steps(NamedTuple):
    """Sizes of candidates; small, so that the network computes nearly the same with them.

    Attributes:
        split: length of a split's change d, as a part of the length of the channel's weights w.
        new: length of a new channel's outgoing weights, as a part of the typical length of the old channels' ones.
    """

    split: float = 0.2
    new: float = 0.05


DEFAULT_STEPS = Steps()


class CandidateLayer(nn.Module):
    """Base of the layers of a network with candidates: inputs from the new channels of the layer before.

    Args:
        weight: of the layer without candidates, (O, I, …).
        steps: how large candidates are.
    """

    outgoing: nn.Parameter

    def __init__(self, weight: Tensor, steps: Steps) -> None:
        super().__init__()
        self.weight = weight
        # The root mean square length of an input's outgoing weights.
        self.outgoing_length = steps.new * (weight.square().sum() / weight.size(1)).sqrt()

    def outgoing_weight(self) -> Tensor:
        """Return outgoing weights of the new channels of the layer before, (O, P, …)."""
        return (self.outgoing * self.outgoing_length).transpose(0, 1)


class CandidateBlock(CandidateLayer):
    """A convolution, batch norm, ReLU with its candidates.

    Args:
        block: what it is without candidates, with one member; stays as it is.
        num_new_before: P.
        num_new: Q.
        steps: how large candidates are.
        generator: of the first directions, on the CPU.
    """

    def __init__(self, block: ConvBlock, num_new_before: int, num_new: int, steps: Steps, generator: Generator) -> None:
        super().__init__(block.conv.weight.detach()[0], steps)
        out_channels, in_channels = self.weight.shape[:2]
        self.norm_weight, self.norm_bias = block.norm.weight.detach()[0], block.norm.bias.detach()[0]
        self.new_norm = nn.BatchNorm2d(num_new, affine=False, momentum=None).to(self.weight)
        lengths = self.weight.flatten(1).norm(dim=1)
        self.split_lengths = steps.split * lengths.view(-1, 1, 1, 1)
        self.new_length = lengths.square().mean().sqrt()
        kernel = self.weight.shape[2:]
        self.split = random_directions((out_channels, in_channels, *kernel), self.weight, generator)
        self.new = random_directions((num_new, in_channels, *kernel), self.weight, generator)
        self.outgoing = random_directions((num_new_before, out_channels, *kernel), self.weight, generator)
        self.set_path(1.0)

    def set_path(self, position: float) -> tuple[Tensor, Tensor]:
        """Set the position of all candidates on their paths; return it for each split, (O), and new channel, (Q)."""
        self.split_path, self.new_path = (
            torch.full_like(each[:, 0, 0, 0], position, requires_grad=True) for each in (self.split, self.new)
        )
        return self.split_path, self.new_path

    def split_change(self) -> Tensor:
        """Return d of every channel that may be split, (O, I, 3, 3)."""
        return self.split * self.split_lengths

    def new_weight(self) -> Tensor:
        """Return incoming weights of the new channels, (Q, I, 3, 3); batch norm makes their length immaterial."""
        return self.new * self.new_length

    def forward(self, x: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        """Map images, (B, I, H, W), or what the block before returns, (B, 2 I + P, H, W), to (B, 2 O + Q, H, W)."""
        out_channels, in_channels = self.weight.shape[:2]
        weights = torch.cat([self.weight, self.split_change(), self.new_weight()])
        heard, new_before = join_halves(x, in_channels)
        sizes = [out_channels, len(self.split), len(self.new)]
        old, change, new = F.conv2d(heard, weights, padding=1).split(sizes, dim=1)
        if len(self.outgoing):
            old = old + F.conv2d(new_before, self.outgoing_weight(), padding=1)
        change = change * self.split_path[:, None, None]
        halves = [F.relu(self._norm(half)) for half in (old + change, old - change)]
        new = F.relu(self.new_norm(new)) if len(self.new) else new
        return torch.cat([*halves, new * self.new_path[:, None, None]], dim=1)

    def _norm(self, x: Tensor) -> Tensor:
        """Normalise by the batch, as in training: a constant shift that training takes out again is no gain."""
        return F.batch_norm(x, None, None, self.norm_weight, self.norm_bias, training=True, eps=BATCH_NORM_EPS)


class CandidateClassifier(CandidateLayer):
    """The linear layer behind the last candidates; arguments as those of `CandidateBlock`."""

    def __init__(self, classifier: MemberLinear, num_new_before: int, steps: Steps, generator: Generator) -> None:
        super().__init__(classifier.weight.detach()[0], steps)
        self.bias = classifier.bias.detach()[0]
        self.outgoing = random_directions((num_new_before, len(self.weight)), self.weight, generator)

    def forward(self, features: Tensor) -> Tensor:
        """Map (1, B, 2 I + P) to (1, B, K)."""
        old, new = join_halves(features[0], self.weight.size(1))
        weight = torch.cat([self.weight, self.outgoing_weight()], dim=1)
        return F.linear(torch.cat([old, new], dim=1), weight, self.bias)[None]


class CandidateVGG(VGG):
    """A network with candidates in every layer; its only parameters are their directions, each of length 1.

    Args:
        network: with `ConvBlock`s and one member; stays as it is.
        num_new: Q of each convolution.
        steps: how large candidates are.
        generator: of the first directions, on the CPU.
    """

    def __init__(self, network: VGG, num_new: Sequence[int], steps: Steps, generator: Generator) -> None:
        old = conv_blocks(network)
        super().__init__(
            *outer_sizes(network),
            [block.conv.weight.size(1) for block in old],
            make_block=lambda layer, _before, _after: CandidateBlock(
                old[layer], num_new[layer - 1] if layer else 0, num_new[layer], steps, generator
            ),
            variant=network.variant,
        )
        self.add_module("classifier", CandidateClassifier(network.classifier, num_new[-1], steps, generator))

    def layers(self) -> Iterator[CandidateBlock]:
        for block in self.blocks:
            assert isinstance(block, CandidateBlock)
            yield block


def join_halves(x: Tensor, num_old: int) -> tuple[Tensor, Tensor]:
    """Return the means of both halves of each old channel, and the new channels behind them.

    Not before here: a max pool between the layers treats each half by itself, as it will once they are channels.

    Args:
        x: (B, 2 I + P, …), or (B, I, …) images, which have no halves.
        num_old: I.
    """
    if x.size(1) == num_old:
        return x, x[:, num_old:]
    first, second, new = x.split([num_old, num_old, x.size(1) - 2 * num_old], dim=1)
    return (first + second) / 2, new


def conv_blocks(network: VGG) -> list[ConvBlock]:
    """Return the blocks of a plain network with one member."""
    assert network.num_members == 1
    blocks = [block for block in network.blocks if isinstance(block, ConvBlock)]
    assert len(blocks) == len(network.blocks)
    return blocks


def outer_sizes(network: VGG) -> tuple[tuple[int, int, int], int]:
    """Return (C, H, W) of the smallest images that a network takes, and K."""
    image_channels = conv_blocks(network)[0].conv.weight.size(2)
    return (image_channels, SMALLEST_IMAGE, SMALLEST_IMAGE), network.classifier.bias.size(1)


def random_directions(shape: Sequence[int], like: Tensor, generator: Generator) -> nn.Parameter:
    """Draw a direction of length 1 for each candidate: ``shape`` is their number, then the shape of a direction.

    On the CPU, so that every device gets the same ones, then of the type and on the device of ``like``.
    """
    return nn.Parameter(unit_length(torch.randn(*shape, generator=generator)).to(like))


def unit_length(directions: Tensor) -> Tensor:
    """Scale each candidate's direction to length 1; one of length 0 stays so."""
    return F.normalize(directions.flatten(1)).view_as(directions)


@torch.no_grad()
def keep_candidates(network: VGG, candidates: CandidateVGG, growth: Sequence[KeptCandidates]) -> VGG:
    """Return a network of one member, which stays as it is, with those of its candidates in it that are kept."""
    before = [_NOTHING, *growth[:-1]]
    state = {}
    for number, (old, block) in enumerate(zip(conv_blocks(network), candidates.layers(), strict=True)):
        kept = growth[number]
        state[f"blocks.{number}.conv.weight"] = _wider_convolution(block, before[number], kept)
        for name, values in _wider_norm(old.norm, block, kept).items():
            state[f"blocks.{number}.norm.{name}"] = values
    head = candidates.get_submodule("classifier")
    assert isinstance(head, CandidateClassifier)
    state["classifier.weight"] = _wider_inputs(head.weight, head.outgoing_weight(), growth[-1])
    state["classifier.bias"] = head.bias
    channels = [len(state[f"blocks.{number}.norm.weight"]) for number in range(len(growth))]
    grown = VGG(*outer_sizes(network), channels, variant=network.variant)
    grown.to(network.classifier.weight)
    grown.load_member_state(0, {name: tensor[None] for name, tensor in state.items()})
    return grown.train(network.training)


def _wider_convolution(block: CandidateBlock, before: KeptCandidates, kept: KeptCandidates) -> Tensor:
    """Return the (O + S + Q, I + T + P, 3, 3) weight."""
    change = block.split_change()[kept.split]
    first_halves = block.weight.index_add(0, _rows(kept.split, block.weight), change)
    weight = torch.cat([first_halves, block.weight[kept.split] - change, block.new_weight()[kept.new]])
    # Both halves of a channel hear from the new channels before what the whole one did, new ones hear nothing yet.
    outgoing = block.outgoing_weight()
    silent = outgoing.new_zeros(len(kept.new), *outgoing.shape[1:])
    return _wider_inputs(weight, torch.cat([outgoing, outgoing[kept.split], silent]), before)


def _wider_inputs(weight: Tensor, outgoing: Tensor, before: KeptCandidates) -> Tensor:
    """Return a weight for the inputs of a layer whose layer before has grown.

    Args:
        weight: (O, I, …).
        outgoing: (O, all new channels before, …).
        before: T inputs that were split and P new ones.

    Returns:
        (O, I + T + P, …).
    """
    halves = weight[:, before.split] / 2
    first_halves = weight.index_copy(1, _rows(before.split, weight), halves)
    return torch.cat([first_halves, halves, outgoing[:, before.new]], dim=1)


def _wider_norm(old: MemberBatchNorm2d, block: CandidateBlock, kept: KeptCandidates) -> dict[str, Tensor]:
    """Return parameters and statistics of O + S + Q channels; halves have those of the whole, new ones measured."""
    new = block.new_norm
    assert new.running_mean is not None and new.running_var is not None
    of_new = {
        "weight": torch.ones_like(new.running_mean),
        "bias": torch.zeros_like(new.running_mean),
        "running_mean": new.running_mean,
        "running_var": new.running_var,
    }
    return {
        name: torch.cat([values[0], values[0][kept.split], of_new[name][kept.new]])
        for name, values in old.state_dict().items()
    }


def _rows(indices: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(indices, dtype=torch.int64, device=like.device)
