"""All parameters of a network in one tensor, so that an optimizer's update is a handful of operations in all.

A network of some ten small tensors spends more time on starting its optimizer's operations than on computing them.
Optimizers that treat each number by itself (AdaDelta, SGD, Adam) do the same to one long tensor.
"""

import torch
from torch import nn


class FlatParameters:
    """The parameters of a network, and their gradients, as one parameter.

    From here on the network's own parameters are views: an update of ``flat`` is an update of the network, and a
    backward pass adds to ``flat.grad``.

    Args:
        network: on its device already; its parameters must not be replaced afterwards.
    """

    def __init__(self, network: nn.Module) -> None:
        parameters = list(network.parameters())
        self.flat = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in parameters]))
        self.flat.grad = torch.zeros_like(self.flat)
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            parameter.data = self.flat.data[start:end].view_as(parameter)
            parameter.grad = self.flat.grad[start:end].view_as(parameter)
            start = end

    def zero_grad(self) -> None:
        """Clear all gradients, in place."""
        assert self.flat.grad is not None
        self.flat.grad.zero_()
