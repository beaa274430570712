"""Wider and deeper networks of the image study that compute what the old ones do (Net2Net, Chen et al. 2016).

A unit, a neuron or a feature map, becomes several that compute the same; what reads them is split among them in unequal
parts, as of language models (``growth.width``). A new hidden layer begins as the identity: what it reads is not
negative, so that its ReLU changes nothing.

Letters: N members, I input and O output features or channels.
"""

from typing import Mapping

import torch
from torch import Generator, Tensor

from fairseq_alma.growth.width import unequal_parts

State = dict[str, Tensor]


def widen_mlp(state: Mapping[str, Tensor], width: int, num_hidden: int, generator: Generator) -> State:
    """Return the weights of a fully connected network with wider hidden layers, and more of them.

    Args:
        state: of an `MLP`.
        width: neurons of each hidden layer, at least those that it has.
        num_hidden: hidden layers, at least those that it has.
        generator: of the parts, on the CPU.
    """
    grown, last = dict(state), len(state) // 2 - 1
    for layer in range(last):
        _widen(grown, [f"layers.{layer}.{name}" for name in ("weight", "bias")], f"layers.{layer + 1}.weight", width,
               generator)  # fmt: skip
    output = {name: grown.pop(f"layers.{last}.{name}") for name in ("weight", "bias")}
    for layer in range(last, num_hidden):
        bias = torch.zeros_like(grown["layers.0.bias"])
        grown[f"layers.{layer}.weight"] = torch.eye(width).to(bias).expand(len(bias), -1, -1).clone()
        grown[f"layers.{layer}.bias"] = bias
    return grown | {f"layers.{num_hidden}.{name}": each for name, each in output.items()}


def widen_vgg(state: Mapping[str, Tensor], channels: int, generator: Generator) -> State:
    """Return the weights of a VGG network of `ConvBlock`s with so many feature maps in each layer.

    Args:
        state: of a `VGG`.
        channels: at least those that it has.
        generator: of the parts, on the CPU.
    """
    grown, block = dict(state), 0
    while f"blocks.{block}.conv.weight" in grown:
        here, above = f"blocks.{block}.", f"blocks.{block + 1}.conv.weight"
        writers = [name for name in grown if name.startswith(here)]
        _widen(grown, writers, above if above in grown else "classifier.weight", channels, generator)
        block += 1
    return grown


def _widen(state: State, writers: list[str], reader: str, width: int, generator: Generator) -> None:
    """Give a layer so many units, in place.

    Args:
        state: of the network.
        writers: names of (N, O, …) tensors that have a row for each unit.
        reader: name of the (N, O, I, …) weight that reads them.
        width: units wanted.
        generator: of the parts, on the CPU.
    """
    old = state[reader]
    source = torch.arange(width) % old.size(2)
    parts = unequal_parts(source, (old.size(1), width), generator)
    if parts.dim():
        parts = parts.view(old.size(1), width, *[1] * (old.dim() - 3))
    rows = source.to(old.device)
    state[reader] = old.index_select(2, rows) * parts.to(old)
    for name in writers:
        state[name] = state[name].index_select(1, rows)
