"""What networks for images have in common: N members side by side, images in, logits out.

Letters: N members, B images, C channels, H and W height and width, K classes.
"""

from dataclasses import dataclass
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

import torch
from torch import Generator, Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


class ImageKind(NamedTuple):
    """What images there are.

    Attributes:
        shape: (C, H, W).
        num_classes: K.
    """

    shape: Sequence[int]
    num_classes: int


class ImageNetwork(nn.Module):
    """A network of N members; every parameter and buffer has the members as its first dimension.

    Args:
        num_members: N.
    """

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
        """Return what a state, or what has names out of it, says of one member; as `member_state`."""
        if self.num_members == 1:
            return dict(state)
        return {name: tensor[member : member + 1] for name, tensor in state.items()}

    def load_member_state(self, member: int, state: Mapping[str, Tensor]) -> None:
        """Load the state of one member. Raises KeyError or RuntimeError if it does not fit."""
        load_exactly(self.member_state(member), state)


class SideBySide(ImageNetwork):
    """Networks of one member each that are computed one after the other: for those that know no stack.

    Args:
        networks: N networks.
    """

    def __init__(self, networks: Sequence[ImageNetwork]) -> None:
        super().__init__(len(networks))
        self.networks = nn.ModuleList(networks)

    def forward(self, images: Tensor, generators: Sequence[Generator] = ()) -> Tensor:
        """Classify images; see `ImageNetwork`."""
        inputs = images if images.dim() == 5 else [images] * self.num_members
        own = [[each] for each in generators] if len(generators) > 1 else [generators] * self.num_members
        return torch.cat([network(*each) for network, *each in zip(self.networks, inputs, own, strict=True)])

    def reset_parameters(self, generators: Sequence[Generator]) -> None:
        """Draw initial weights; see `ImageNetwork`."""
        for network, generator in zip(self._each(), generators, strict=True):
            network.reset_parameters([generator])

    def part_of(self, state: Mapping[str, Tensor], member: int) -> dict[str, Tensor]:
        """Return what a state says of one network; see `ImageNetwork`."""
        prefix = f"networks.{member}."
        return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}

    def _each(self) -> Iterator[ImageNetwork]:
        for network in self.networks:
            assert isinstance(network, ImageNetwork)
            yield network


def join_logits(logits: Tensor, how: str) -> Tensor:
    """Join the (N, B, K) logits of members that are one model to (B, K): their ``mean`` or their ``sum``."""
    return logits.mean(dim=0) if how == "mean" else logits.sum(dim=0)


def reset_children(module: nn.Module, generators: Sequence[Generator]) -> None:
    """Draw the initial weights of what a module consists of, in order; a child that knows how does it by itself."""
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


@dataclass(frozen=True)
class NetworkFlops:
    """Operations per image, over all members.

    Attributes:
        train: of a forward and a backward pass; with hard gates all experts are computed in training.
        test: of a forward pass; with hard gates one expert of each layer.
    """

    train: int
    test: int


def count_flops(network: ImageNetwork, image_shape: Sequence[int]) -> NetworkFlops:
    """Count the operations for one (C, H, W) image while it runs; see `metrics.flops` for what counts.

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


CHUNK_VALUES = 1 << 21  # pixels, of all channels, that are predicted at a time: bounds the memory, not the result


def in_chunks(images: Tensor) -> Sequence[Tensor]:
    """Split (B, C, H, W) images into what is predicted at a time."""
    return images.split(max(1, CHUNK_VALUES // max(1, images[:1].numel())))


@torch.no_grad()
def member_logits(network: ImageNetwork, images: Tensor) -> Tensor:
    """Return the (N, B, K) logits for (B, C, H, W) images, in evaluation mode."""
    if network.training:
        network.eval()
    logits = [network(chunk) for chunk in in_chunks(images)]
    return logits[0] if len(logits) == 1 else torch.cat(logits, dim=1)


def member_states(network: ImageNetwork) -> list[dict[str, Tensor]]:
    """Return the state of each member; their memory is the network's."""
    return [network.member_state(member) for member in range(network.num_members)]
