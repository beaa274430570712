"""All parameters of a network in a few long tensors, so that an optimizer's update is a handful of operations in all.

A network of some ten small tensors spends more time on starting its optimizer's operations than on computing them; one
whose tensors do not fit into a processor's cache waits for its memory in each of these operations. Optimizers that
treat each number by itself (AdaDelta, SGD, Adam) do the same however the numbers are cut.
"""

import torch
from torch import nn

PART = 65_536  # numbers: an optimizer's tensors for so many, five of 256 KiB, stay in the cache of a core


class FlatParameters:
    """The parameters of a network, and their gradients, as parts of one tensor.

    From here on the network's own parameters are views: an update of the parts is an update of the network, and a
    backward pass adds to their gradients.

    Args:
        network: on its device already; its parameters must not be replaced afterwards.

    Attributes:
        parts: what an optimizer is to update: of at most `PART` numbers on a CPU; on a GPU a single one.
    """

    def __init__(self, network: nn.Module) -> None:
        parameters = list(network.parameters())
        flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self._grad = torch.zeros_like(flat)
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            parameter.data = flat[start:end].view_as(parameter)
            parameter.grad = self._grad[start:end].view_as(parameter)
            start = end
        size = PART if flat.device.type == "cpu" else flat.numel()
        self.parts = [nn.Parameter(part) for part in flat.split(size)]
        for part, grad in zip(self.parts, self._grad.split(size), strict=True):
            part.grad = grad

    def zero_grad(self) -> None:
        """Clear all gradients, in place."""
        self._grad.zero_()
