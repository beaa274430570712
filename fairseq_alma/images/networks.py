"""Networks for image classification: `MLP` and `VGG` (VGG19) (paper v5, section 5, Appendices B.1.1 and B.1.2).

A network has N members: models with separate weights that run in one batched operation. Except for rounding, a member
has the same output as a separate network with the same weights. A single model is the case N = 1.

The paper uses the reduced VGG of Wu et al. 2020 (Firefly) and gives no details. `VGG` has sixteen 3 x 3
convolutions in five groups, with batch norm and the same number of channels in every layer. Max pooling follows each of
the first four groups; global average pooling and one linear layer follow the last group. The initial weights follow He
et al. 2015 (fan-out), as in VGG. The paper's released code has a fifth max pooling and torch's initial weights.

Letters in shapes: N members, U models, B images, I input features or channels, O output features or channels, C
channels of an image, H height, W width, K classes.
"""

import itertools
import math
from typing import Any, Iterable, Mapping, NamedTuple, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fairseq_alma.errors import AlmaError

BATCH_NORM_EPS = 1e-5
BATCH_NORM_MOMENTUM = 0.1
CHUNK_VALUES = 1 << 21  # maximum number of image values (pixels times channels) in a prediction batch; limits memory
VGG19 = (2, 2, 4, 4, 4)  # convolutions of each group
NUM_CONVOLUTIONS = sum(VGG19)
SMALLEST_IMAGE = 2 ** (len(VGG19) - 1)


class ImageKind(NamedTuple):
    """Format of the images of a stream: shape (C, H, W), and number of classes."""

    shape: Sequence[int]
    num_classes: int


class ImageNetwork(nn.Module):
    """Network of N members: U = N separate models, or one joint model (U = 1).

    With N > 1, the first dimension of every parameter and buffer indexes the members, except in `NetworkList`.
    """

    min_batch = 1  # minimum number of images in a training batch
    joint_logits: Optional[str] = None  # how the logits of a joint model are combined: ``mean`` or ``sum``

    def __init__(self, num_members: int) -> None:
        super().__init__()
        self.num_members = num_members

    def forward(self, images: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        """Return the logits (U, B, K) of the models.

        Args:
            images: normalized images (U, B, C, H, W), or images (B, C, H, W) that all members share.
            generators: random generators on the CPU for hard gates in training, one for each member or one for all
                members. Empty: torch's global generator.
        """
        if self.joint_logits is None:
            return self.member_logits(images, generators)
        logits = self.member_logits(images[0] if images.dim() == 5 else images, generators)
        logits = logits if self.training else logits.float()  # autocast must not round the results of a test
        return logits.mean(0, keepdim=True) if self.joint_logits == "mean" else logits.sum(0, keepdim=True)

    def member_logits(self, images: Tensor, generators: Sequence[Generator]) -> Tensor:
        """Return the logits (N, B, K) of all members; see `forward` for the arguments."""
        raise NotImplementedError

    def check_batch(self, num_images: int) -> None:
        """Raise AlmaError if the network cannot train on a batch of ``num_images`` images."""
        if num_images < self.min_batch:
            raise AlmaError(
                "--batch-size: batch norm cannot train on a batch of 1 image below 32 x 32 pixels; give --batch-size "
                "2 or more, a stage with at least 2 training images, or an --arch without convolutions"
            )

    def reset_parameters(self, generators: Sequence[Generator]) -> None:
        """Sample the initial weights of each member with the member's generator."""
        for child in self.children():
            reset_parameters(child, generators)

    def member_state(self, state: Mapping[str, Tensor], member: int) -> dict[str, Tensor]:
        """Return views of one member's tensors in ``state``, a state dictionary of the network."""
        return {name: tensor[member : member + 1] for name, tensor in state.items()}

    def model_states(self, state: Optional[Mapping[str, Tensor]] = None) -> list[dict[str, Tensor]]:
        """Return views of each model's tensors in ``state``, a state dictionary (None: of this network)."""
        state = self.state_dict() if state is None else state
        if self.joint_logits is not None or self.num_members == 1:
            return [dict(state)]
        return [self.member_state(state, member) for member in range(self.num_members)]


class NetworkList(ImageNetwork):
    """List of separate networks, one per member, for architectures whose members cannot run in one operation."""

    def __init__(self, networks: Sequence[ImageNetwork]) -> None:
        super().__init__(len(networks))
        self.networks: Any = nn.ModuleList(networks)  # Any because mypy does not know the class of the networks
        self.min_batch = networks[0].min_batch

    def member_logits(self, images: Tensor, generators: Sequence[Generator]) -> Tensor:
        inputs = images if images.dim() == 5 else [images] * self.num_members
        own = [[each] for each in generators] if len(generators) > 1 else [generators] * self.num_members
        return torch.cat([network(*each) for network, *each in zip(self.networks, inputs, own, strict=True)])

    def reset_parameters(self, generators: Sequence[Generator]) -> None:
        for network, generator in zip(self.networks, generators, strict=True):
            network.reset_parameters([generator])

    def member_state(self, state: Mapping[str, Tensor], member: int) -> dict[str, Tensor]:
        prefix = f"networks.{member}."
        return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def reset_parameters(module: Any, generators: Sequence[Generator]) -> None:
    """Sample the initial weights of a module, or of its children if it has no method for this."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters(generators)
    else:
        for child in module.children():
            reset_parameters(child, generators)


def load_exactly(into: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy all tensors of ``state`` to ``into``. Raises KeyError if names differ, and RuntimeError if shapes differ."""
    if into.keys() != state.keys():
        raise KeyError(f"missing or unexpected tensors: {', '.join(sorted(set(into) ^ set(state)))}")
    for name, tensor in into.items():
        if tensor.shape != state[name].shape:
            raise RuntimeError(f"{name}: expected shape {tuple(tensor.shape)}, found {tuple(state[name].shape)}")
        tensor.copy_(state[name])


class NetworkFlops(NamedTuple):
    """FLOPs for one image, summed over all members.

    Attributes:
        train: FLOPs of a forward and a backward pass (three times a forward pass); hard gates compute all experts.
        test: FLOPs of a forward pass in evaluation; hard gates compute one expert in each layer.
    """

    train: int
    test: int


def count_flops(network: ImageNetwork, image_shape: Sequence[int]) -> NetworkFlops:
    """Return the FLOPs for one image of shape (C, H, W), measured by running the network.

    ``torch.utils.flop_counter`` defines which operations count. The function leaves the network in evaluation mode and
    restores the buffers.
    """
    buffers = [(buffer, buffer.clone()) for buffer in network.buffers()]
    # Batch norm cannot train on a single value, so count the FLOPs of two images and divide by 2.
    images = torch.zeros(2, *image_shape, device=next(network.parameters()).device)
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
    """Split images (B, C, H, W) into prediction batches; `CHUNK_VALUES` limits the batch size to save memory."""
    return images.split(max(1, CHUNK_VALUES // max(1, images[:1].numel())))


def init_as_linear(weight: Tensor, bias: Tensor, generator: Generator) -> None:
    """Initialize weight (O, I) and bias (O,) in place: uniform in ±1 / sqrt(I), as in ``torch.nn.Linear``."""
    bound = 1 / math.sqrt(weight.size(-1))
    nn.init.uniform_(weight, -bound, bound, generator=generator)
    nn.init.uniform_(bias, -bound, bound, generator=generator)


class MemberLinear(nn.Module):
    """Linear layers from I to O features, one layer for each member."""

    def __init__(self, num_members: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_members, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_members, out_features))

    def reset_parameters(self, generators: Sequence[Generator]) -> None:
        """Sample initial weights as ``torch.nn.Linear`` does, for each member with the member's generator."""
        for weight, bias, generator in zip(self.weight, self.bias, generators, strict=True):
            init_as_linear(weight, bias, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (N, B, I), or inputs (B, I) that all members share, to outputs (N, B, O)."""
        num_members, out_features, _ = self.weight.shape
        if num_members == 1:
            return F.linear(x if x.dim() == 2 else x.squeeze(0), self.weight.squeeze(0), self.bias.squeeze(0))[None]
        if x.dim() == 2:
            out = F.linear(x, self.weight.flatten(0, 1), self.bias.flatten())
            return out.view(x.size(0), num_members, out_features).transpose(0, 1)
        return torch.baddbmm(self.bias[:, None], x, self.weight.transpose(1, 2))


class MemberConv2d(nn.Module):
    """3 x 3 convolutions with padding 1 and no bias, one convolution for each member.

    The channels of all members are concatenated.

    Attributes:
        initial_weights: distribution of initial weights: ``he`` (normal with variance 2 / (9 O), as in VGG, He et al.
            2015) or ``default`` (uniform in ±1 / sqrt(9 I), as in ``torch.nn.Conv2d``).
    """

    initial_weights = "he"

    def __init__(self, num_members: int, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_members, out_channels, in_channels, 3, 3))

    @torch.no_grad()
    def reset_parameters(self, generators: Sequence[Generator]) -> None:
        for weight, generator in zip(self.weight, generators, strict=True):
            if self.initial_weights == "he":
                nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu", generator=generator)
            else:
                bound = 1 / math.sqrt(weight[0].numel())
                nn.init.uniform_(weight, -bound, bound, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (B, N I, H, W), or inputs (B, I, H, W) that all members share, to outputs (B, N O, H, W)."""
        return F.conv2d(x, self.weight.flatten(0, 1), padding=1, groups=x.size(1) // self.weight.size(2))


class MemberBatchNorm2d(nn.Module):
    """Batch norm of the O channels of each member, as in ``torch.nn.BatchNorm2d``."""

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
        """Normalize each channel of ``x``, (B, N O, H, W)."""
        statistics = self.running_mean.view(-1), self.running_var.view(-1)
        affine = self.weight.view(-1), self.bias.view(-1)
        return F.batch_norm(x, *statistics, *affine, self.training, self.momentum, BATCH_NORM_EPS)


class MLP(ImageNetwork):
    """Fully connected network of N members, each with ``num_hidden`` hidden layers of ``width`` neurons."""

    def __init__(
        self, image_shape: Sequence[int], num_classes: int, width: int, num_hidden: int = 2, num_members: int = 1
    ) -> None:
        super().__init__(num_members)
        sizes = [math.prod(image_shape)] + [width] * num_hidden + [num_classes]
        self.layers = nn.ModuleList(
            MemberLinear(num_members, before, after) for before, after in itertools.pairwise(sizes)
        )

    def member_logits(self, images: Tensor, generators: Sequence[Generator]) -> Tensor:
        *hidden, last = self.layers
        x = images.flatten(-3)
        for layer in hidden:
            x = F.relu(layer(x))
        return last(x)


class ConvBlock(nn.Module):
    """Convolutional block: convolution, batch norm and ReLU."""

    def __init__(self, num_members: int, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = MemberConv2d(num_members, in_channels, out_channels)
        self.norm = MemberBatchNorm2d(num_members, out_channels)

    def forward(self, x: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        """Map inputs (B, N I, H, W) to outputs (B, N O, H, W)."""
        return F.relu(self.norm(self.conv(x)))


class VGG(ImageNetwork):
    """VGG network: convolutional blocks with pooling between the groups, and one linear layer.

    Args:
        image_shape: shape (C, H, W) of the images; at least 16 x 16 pixels, or 32 x 32 with ``last_pool`` ``max``.
        num_classes: number of classes.
        channels: number of output channels of each convolution.
        num_members: number of members.
        last_pool: pooling after the last convolution: ``mean`` (global average) or ``max`` (a fifth max pooling, then
            global average).
        initial_weights: distribution of the convolutions' initial weights; see `MemberConv2d`.
        blocks: one block for each convolution; None: `ConvBlock`s.
    """

    blocks: Any  # an nn.ModuleList; Any because mypy does not know the class of the blocks

    def __init__(
        self,
        image_shape: Sequence[int],
        num_classes: int,
        channels: Sequence[int],
        num_members: int = 1,
        last_pool: str = "mean",
        initial_weights: str = "he",
        blocks: Optional[Sequence[nn.Module]] = None,
    ) -> None:
        super().__init__(num_members)
        assert len(channels) == NUM_CONVOLUTIONS
        self.image_shape, self.num_classes, self.channels = image_shape, num_classes, tuple(channels)
        self.last_pool = last_pool
        # Batch norm needs two values of each channel; smaller images have one value after four max pooling layers.
        self.min_batch = 1 if max(image_shape[1:]) >= 2 * SMALLEST_IMAGE else 2
        self._pool_after = {end - 1 for end in itertools.accumulate(VGG19 if last_pool == "max" else VGG19[:-1])}
        if blocks is None:
            sizes = itertools.pairwise([image_shape[0], *channels])
            blocks = [ConvBlock(num_members, before, after) for before, after in sizes]
        self.blocks = nn.ModuleList(blocks)
        self.classifier = MemberLinear(num_members, channels[-1], num_classes)
        for module in self.modules():
            if isinstance(module, MemberConv2d):
                module.initial_weights = initial_weights

    def member_logits(self, images: Tensor, generators: Sequence[Generator]) -> Tensor:
        x = images.transpose(0, 1).flatten(1, 2) if images.dim() == 5 else images  # (B, N C, H, W) or (B, C, H, W)
        for layer, block in enumerate(self.blocks):
            x = block(x, generators)
            if layer in self._pool_after:
                x = F.max_pool2d(x, 2)
        features = x.mean(dim=(2, 3)).unflatten(1, (self.num_members, -1))  # (B, N, O)
        return self.classifier(features.transpose(0, 1))


@torch.no_grad()
def measure_batch_norm(network: ImageNetwork, batches: Iterable[Tensor]) -> None:
    """Set the batch norm statistics to their mean over ``batches`` of normalized images (B, C, H, W)."""
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
