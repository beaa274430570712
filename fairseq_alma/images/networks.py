"""The networks of the image study: fully connected, and VGG19 (paper v5, section 5 and Appendices B.1.1 and B.1.2).

A network has N members, models side by side: each has weights of its own, all are computed in one operation. What a
member computes here is what it computes alone, to rounding; members never exchange anything. A single model is the case
N = 1, so that models and stacks of models are the same code.

Of VGG the paper says that it is the reduced one of Wu et al. 2020 (Firefly), and no more. Here: sixteen 3 by 3
convolutions in five groups, all of the same number of channels, with batch norm, a max pooling after each of the first
four groups, the mean over what is left of the image, one linear layer, and VGG's own initial weights (fan-out, He et
al. 2015). The paper's released code has a fifth max pooling instead of the mean, and torch's default initial weights: a
`Variant`.

Letters: N members, B images, I input and O output features or channels, C channels of an image, H and W height and
width, K classes.
"""

import itertools
import math
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fairseq_alma.moe.gate import draw_as_linear

BATCH_NORM_EPS = 1e-5
BATCH_NORM_MOMENTUM = 0.1
CHUNK_VALUES = 1 << 21  # pixels, of all channels, that are predicted at a time: bounds the memory, not the result


class ImageKind(NamedTuple):
    """Shape (C, H, W) of the images, and number of classes K."""

    shape: Sequence[int]
    num_classes: int


class ImageNetwork(nn.Module):
    """A network of N members; every parameter and buffer has the members as its first dimension."""

    def __init__(self, num_members: int) -> None:
        super().__init__()
        self.num_members = num_members

    def forward(self, images: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        """Classify images.

        Args:
            images: (N, B, C, H, W), other images for each member, or (B, C, H, W), the same for all; normalised.
            generators: of each member's random choices, which only training with hard gates makes, on the CPU; one: of
                all members' choices; none: torch's global one.

        Returns:
            (N, B, K) logits.
        """
        raise NotImplementedError

    def reset_parameters(self, generators: Sequence[Generator]) -> None:
        """Draw the initial weights of each member from a generator of its own."""
        reset_children(self, generators)

    def member_state(self, member: int) -> dict[str, Tensor]:
        """Return the state of one member, as the state of a network with this member alone; its memory is shared."""
        return self.part_of(self.state_dict(), member)

    def part_of(self, state: Mapping[str, Tensor], member: int) -> dict[str, Tensor]:
        """Return the part of a state, or of some of its names, that belongs to one member; as `member_state`."""
        if self.num_members == 1:
            return dict(state)
        return {name: tensor[member : member + 1] for name, tensor in state.items()}

    def load_member_state(self, member: int, state: Mapping[str, Tensor]) -> None:
        """Load the state of one member. Raises KeyError or RuntimeError if it does not fit."""
        load_exactly(self.member_state(member), state)


class SideBySide(ImageNetwork):
    """N networks of one member each, computed one after the other: for architectures that cannot be stacked."""

    def __init__(self, networks: Sequence[ImageNetwork]) -> None:
        super().__init__(len(networks))
        self.networks = nn.ModuleList(networks)

    def forward(self, images: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        inputs = images if images.dim() == 5 else [images] * self.num_members
        own = [[each] for each in generators] if len(generators) > 1 else [generators] * self.num_members
        return torch.cat([network(*each) for network, *each in zip(self.networks, inputs, own, strict=True)])

    def reset_parameters(self, generators: Sequence[Generator]) -> None:
        for network, generator in zip(self.networks, generators, strict=True):
            reset_children(network, [generator])

    def part_of(self, state: Mapping[str, Tensor], member: int) -> dict[str, Tensor]:
        prefix = f"networks.{member}."
        return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def join_logits(logits: Tensor, how: str) -> Tensor:
    """Join the (N, B, K) logits of members that are one model to (B, K): their ``mean`` or their ``sum``."""
    return logits.mean(dim=0) if how == "mean" else logits.sum(dim=0)


def reset_children(module: nn.Module, generators: Sequence[Generator]) -> None:
    """Draw the initial weights of a module's children in order; a child with ``reset_parameters`` draws its own."""
    for child in module.children():
        reset: Any = child  # its own method, which mypy takes for a tensor
        if hasattr(child, "reset_parameters"):
            reset.reset_parameters(generators)
        else:
            reset_children(child, generators)


def load_exactly(into: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy tensors in place; both sides must have the same names and shapes."""
    if into.keys() != state.keys():
        raise KeyError(f"state with {', '.join(sorted(set(into) ^ set(state)))} missing or left over")
    for name, tensor in into.items():
        if tensor.shape != state[name].shape:
            raise RuntimeError(f"{name}: shape {tuple(state[name].shape)} where {tuple(tensor.shape)} is needed")
        tensor.copy_(state[name])


class NetworkFlops(NamedTuple):
    """Operations per image, over all members.

    Attributes:
        train: of a forward and a backward pass; with hard gates all experts are computed in training.
        test: of a forward pass; with hard gates one expert of each layer.
    """

    train: int
    test: int


def count_flops(network: ImageNetwork, image_shape: Sequence[int]) -> NetworkFlops:
    """Count the operations for one (C, H, W) image while it runs; see `metrics` for what counts.

    Leaves buffers as they were, and evaluation mode.
    """
    device = next(network.parameters()).device
    buffers = [(buffer, buffer.clone()) for buffer in network.buffers()]
    # Two images and half the operations, as batch norm refuses to train on a single number.
    images = torch.zeros(2, *image_shape, device=device)
    counts = []
    for is_training in (True, False):
        network.train(is_training)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(images, [torch.Generator().manual_seed(0)])
        counts.append(counter.get_total_flops() // 2)
    for buffer, before in buffers:
        buffer.copy_(before)
    return NetworkFlops(train=3 * counts[0], test=counts[1])


def in_chunks(images: Tensor) -> Sequence[Tensor]:
    """Split (B, C, H, W) images into batches that are predicted at a time."""
    return images.split(max(1, CHUNK_VALUES // max(1, images[:1].numel())))


@torch.no_grad()
def member_logits(network: nn.Module, images: Tensor) -> Tensor:
    """Return the (N, B, K) logits for (B, C, H, W) images, in evaluation mode."""
    if network.training:
        network.eval()
    logits = [network(chunk) for chunk in in_chunks(images)]
    return logits[0] if len(logits) == 1 else torch.cat(logits, dim=1)


def member_states(network: ImageNetwork) -> list[dict[str, Tensor]]:
    """Return the state of each member; their memory is the network's."""
    return [network.member_state(member) for member in range(network.num_members)]


class MemberLinear(nn.Module):
    """A linear map of I to O features for each member."""

    def __init__(self, num_members: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_members, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_members, out_features))

    def reset_parameters(self, generators: Sequence[Generator]) -> None:
        """Draw initial weights as ``torch.nn.Linear`` does, those of each member from a generator of its own."""
        for weight, bias, generator in zip(self.weight, self.bias, generators, strict=True):
            draw_as_linear(weight, bias, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, B, I), or (B, I) that all members share, to (N, B, O)."""
        num_members, out_features, _ = self.weight.shape
        if num_members == 1:
            return F.linear(x if x.dim() == 2 else x.squeeze(0), self.weight.squeeze(0), self.bias.squeeze(0))[None]
        if x.dim() == 2:
            out = F.linear(x, self.weight.flatten(0, 1), self.bias.flatten())
            return out.view(x.size(0), num_members, out_features).transpose(0, 1)
        return torch.baddbmm(self.bias[:, None], x, self.weight.transpose(1, 2))


class MemberConv2d(nn.Module):
    """A 3 by 3 convolution with padding 1 and no bias for each member; members' channels lie behind each other."""

    def __init__(self, num_members: int, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.initial_weights = "he"
        self.weight = nn.Parameter(torch.empty(num_members, out_channels, in_channels, 3, 3))

    @torch.no_grad()
    def reset_parameters(self, generators: Sequence[Generator]) -> None:
        """Draw initial weights as ``initial_weights`` says.

        ``he``: from a normal distribution of variance 2 / (9 O), as VGG does (He et al. 2015); ``default``: as
        ``torch.nn.Conv2d`` does, uniform in ±1 / sqrt(9 I).
        """
        for weight, generator in zip(self.weight, generators, strict=True):
            if self.initial_weights == "he":
                nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu", generator=generator)
            else:
                bound = 1 / math.sqrt(weight[0].numel())
                nn.init.uniform_(weight, -bound, bound, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N I, H, W), or (B, I, H, W) that all members share, to (B, N O, H, W)."""
        num_members, _, in_channels = self.weight.shape[:3]
        groups = x.size(1) // in_channels
        assert groups in (1, num_members)
        return F.conv2d(x, self.weight.flatten(0, 1), padding=1, groups=groups)


class MemberBatchNorm2d(nn.Module):
    """Batch normalisation of each member's O channels, as ``torch.nn.BatchNorm2d``."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_members: int, num_channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_members, num_channels))
        self.bias = nn.Parameter(torch.zeros(num_members, num_channels))
        self.register_buffer("running_mean", torch.zeros(num_members, num_channels))
        self.register_buffer("running_var", torch.ones(num_members, num_channels))
        self.momentum = BATCH_NORM_MOMENTUM

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (B, N O, H, W)."""
        return F.batch_norm(
            x,
            self.running_mean.view(-1),
            self.running_var.view(-1),
            self.weight.view(-1),
            self.bias.view(-1),
            training=self.training,
            momentum=self.momentum,
            eps=BATCH_NORM_EPS,
        )


class MLP(ImageNetwork):
    """Fully connected layers: N members, each with ``num_hidden`` hidden layers of ``width`` neurons."""

    def __init__(
        self, image_shape: Sequence[int], num_classes: int, width: int, num_hidden: int = 2, num_members: int = 1
    ) -> None:
        super().__init__(num_members)
        sizes = [math.prod(image_shape)] + [width] * num_hidden + [num_classes]
        self.layers = nn.ModuleList(
            MemberLinear(num_members, before, after) for before, after in itertools.pairwise(sizes)
        )

    def forward(self, images: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        *hidden, last = self.layers
        x = images.flatten(-3)
        for layer in hidden:
            x = F.relu(layer(x))
        return last(x)


VGG19 = (2, 2, 4, 4, 4)  # convolutions of each group, before any growth
NUM_CONVOLUTIONS = sum(VGG19)
SMALLEST_IMAGE = 2 ** (len(VGG19) - 1)
MakeBlock = Callable[[int, int, int], nn.Module]


class Variant(NamedTuple):
    """Which VGG network.

    Attributes:
        last_pool: what follows the last convolution: the ``mean`` over the image; ``max``: a fifth max pooling, then
            the mean over what is left, which of 32 by 32 pixels is one.
        initial_weights: of convolutions, see `MemberConv2d`.
    """

    last_pool: str = "mean"
    initial_weights: str = "he"


USUAL = Variant()


class ConvBlock(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, num_members: int, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = MemberConv2d(num_members, in_channels, out_channels)
        self.norm = MemberBatchNorm2d(num_members, out_channels)

    def forward(self, x: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        """Map (B, N I, H, W) to (B, N O, H, W)."""
        return F.relu(self.norm(self.conv(x)))


class VGG(ImageNetwork):
    """Convolutional blocks, pooling between them, one linear layer.

    Args:
        image_shape: (C, H, W); height and width of at least 16, with five max poolings of 32.
        num_classes: K.
        channels: O of each convolution.
        num_members: N.
        make_block: builds the block of a convolution from its number and its I and O; None: a `ConvBlock`.
        variant: which VGG network.
    """

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        channels: Sequence[int],
        num_members: int = 1,
        make_block: Optional[MakeBlock] = None,
        variant: Variant = USUAL,
    ) -> None:
        super().__init__(num_members)
        self.variant = variant
        assert len(channels) == NUM_CONVOLUTIONS
        self._pool_after = {end - 1 for end in itertools.accumulate(VGG19[:-1])}
        make_block = make_block or (lambda layer, before, after: ConvBlock(num_members, before, after))
        self.blocks = nn.ModuleList(
            make_block(layer, before, after)
            for layer, (before, after) in enumerate(zip([image_shape[0], *channels[:-1]], channels, strict=True))
        )
        self.classifier = MemberLinear(num_members, channels[-1], num_classes)
        for module in self.modules():
            if isinstance(module, MemberConv2d):
                module.initial_weights = variant.initial_weights

    def forward(self, images: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        x = images.transpose(0, 1).flatten(1, 2) if images.dim() == 5 else images  # (B, N C, H, W) or (B, C, H, W)
        for layer, block in enumerate(self.blocks):
            x = block(x, generators)
            if layer in self._pool_after:
                x = F.max_pool2d(x, 2)
        if self.variant.last_pool == "max":
            x = F.max_pool2d(x, 2)
        features = x.mean(dim=(2, 3)).unflatten(1, (self.num_members, -1))  # (B, N, O)
        return self.classifier(features.transpose(0, 1))


@torch.no_grad()
def measure_batch_norm(network: ImageNetwork, batches: Iterable[Tensor]) -> None:
    """Set the statistics of each batch norm to their mean over batches of (B, C, H, W) normalised images."""
    norms = [module for module in network.modules() if isinstance(module, MemberBatchNorm2d)]
    if not norms:
        return
    network.train()
    for number, images in enumerate(batches, start=1):
        for norm in norms:
            norm.momentum = 1 / number
        network(images, [torch.Generator().manual_seed(number)])
    for norm in norms:
        norm.momentum = BATCH_NORM_MOMENTUM
    network.eval()
