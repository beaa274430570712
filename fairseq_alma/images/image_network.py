"""What networks for images have in common: N members side by side, images in, logits out.

Letters: N members, B images, C channels, H and W height and width, K classes.
"""

from typing import Any, Iterator, Mapping, Sequence

import torch
from torch import Generator, Tensor, nn


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
        if self.num_members == 1:
            return self.state_dict()
        return {name: tensor[member : member + 1] for name, tensor in self.state_dict().items()}

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

    def member_state(self, member: int) -> dict[str, Tensor]:
        """Return the state of one network."""
        return self.networks[member].state_dict()

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
