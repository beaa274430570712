"""Which of Firefly's candidates are kept: those with the best scores over all layers, up to a number of parameters.

Every step adds the same share of the *first* size, so that a network grows linearly: "at every growth phase, we add
approximately a quarter of the initial number of parameters" (paper v5, Appendix B.1). Plain numbers, for a chain of
3 by 3 convolutions with batch norm and one linear layer behind it.
"""

from typing import NamedTuple, Sequence


class LayerScores(NamedTuple):
    """The candidates of one layer, each with the change of the loss that it promises; lower is better.

    Attributes:
        split: of each channel of the layer, which may become two.
        new: of each new channel that the layer may get.
    """

    split: Sequence[float]
    new: Sequence[float]


class KeptCandidates(NamedTuple):
    """The candidates of one layer that are kept.

    Attributes:
        split: channels that become two, in ascending order.
        new: numbers of new channels, in ascending order.
    """

    split: list[int]
    new: list[int]


def num_chain_parameters(image_channels: int, channels: Sequence[int], num_classes: int) -> int:
    """Return the parameters of a chain of convolutions.

    Args:
        image_channels: of the images.
        channels: of each convolution's output.
        num_classes: outputs of the linear layer.
    """
    inputs = [image_channels, *channels[:-1]]
    convolutions = sum(9 * before * after for before, after in zip(inputs, channels, strict=True))
    return convolutions + 2 * sum(channels) + (channels[-1] + 1) * num_classes


def select_candidates(
    scores: Sequence[LayerScores], image_channels: int, num_classes: int, num_added: float
) -> list[KeptCandidates]:
    """Take candidates in the order of their scores until the next one would miss the asked size by more.

    Wu et al. 2020 choose in the same way ("greedy selection"), with a number of neurons as the limit.

    Args:
        scores: of each layer; it has as many channels as it has scores of splits.
        image_channels: of the images.
        num_classes: outputs of the linear layer.
        num_added: parameters to add, as nearly as whole channels allow.

    Returns:
        What to keep in each layer; nothing at all if one channel is more than twice what is asked.
    """
    ranked = _ranked(scores)
    growth = [KeptCandidates([], []) for _ in scores]
    channels = [len(layer.split) for layer in scores]
    size = num_chain_parameters(image_channels, channels, num_classes)
    goal = size + num_added
    for _, layer, kind, index in ranked:
        channels[layer] += 1
        next_size = num_chain_parameters(image_channels, channels, num_classes)
        if next_size - goal > goal - size:
            break
        size = next_size
        growth[layer][kind].append(index)
    return _in_order(growth)


def select_neurons(scores: Sequence[LayerScores], num_added: int) -> list[KeptCandidates]:
    """Take a number of candidates in the order of their scores, as the paper's released code does.

    Args:
        scores: of each layer.
        num_added: neurons to add over all layers.
    """
    growth = [KeptCandidates([], []) for _ in scores]
    for _, layer, kind, index in _ranked(scores)[:num_added]:
        growth[layer][kind].append(index)
    return _in_order(growth)


def _ranked(scores: Sequence[LayerScores]) -> list[tuple[float, int, int, int]]:
    """Return score, layer, kind and index of all candidates, the best first."""
    return sorted(
        (score, layer, kind, index)
        for layer, of_layer in enumerate(scores)
        for kind, of_kind in enumerate(of_layer)
        for index, score in enumerate(of_kind)
    )


def _in_order(growth: Sequence[KeptCandidates]) -> list[KeptCandidates]:
    return [KeptCandidates(sorted(layer.split), sorted(layer.new)) for layer in growth]
