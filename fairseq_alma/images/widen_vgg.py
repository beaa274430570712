"""Builds the network that Firefly's kept candidates lead to.

The channels of a grown layer are the old ones, then the second halves of those that were split, then the new ones.

Letters: O output channels of a layer, S of them split, Q new ones; I, T and P the same of the layer before.
"""

from typing import Sequence

import torch
from torch import Tensor

from fairseq_alma.growth.firefly_selection import KeptCandidates
from fairseq_alma.images.firefly_candidates import (
    CandidateBlock,
    CandidateClassifier,
    CandidateVGG,
    conv_blocks,
    outer_sizes,
)
from fairseq_alma.images.member_layers import MemberBatchNorm2d
from fairseq_alma.images.vgg import VGG

_NOTHING = KeptCandidates([], [])


@torch.no_grad()
def widen_vgg(network: VGG, candidates: CandidateVGG, growth: Sequence[KeptCandidates]) -> VGG:
    """Return a network with some of its candidates in it.

    Args:
        network: of one member; stays as it is.
        candidates: of this network.
        growth: what is kept in each layer.
    """
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
    grown = VGG(*outer_sizes(network), channels, variant=network.variant).to(network.classifier.weight)
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
