import random

import pytest

from fairseq_alma.images.candidate_vgg import KeptCandidates
from fairseq_alma.images.firefly import (
    LayerScores,
    num_chain_parameters,
    select_candidates,
    size_of_chain,
)

# Two layers of 2 and 3 channels behind images of 1 channel, 2 classes: 18 + 54 weights, 10 of batch norm, 8 at the end.
FIRST = LayerScores(split=[-5.0, 0.1], new=[-1.0])
SECOND = LayerScores(split=[-4.0, -0.5, 0.0], new=[-3.0, 2.0])
CHANNELS = [2, 3]
PARAMETERS, NEURONS = (size_of_chain(share_of, 1, 2) for share_of in ("parameters", "neurons"))


def test_parameters_of_a_chain_are_counted_as_by_hand():
    assert num_chain_parameters(1, [2, 3], 2) == 18 + 54 + 10 + 8


@pytest.mark.parametrize(
    ("num_added", "first", "second"),
    [
        (0, ([], []), ([], [])),
        (38, ([0], []), ([], [])),  # a channel of the first layer: 9 weights in, 27 out, 2 of batch norm
        (38 + 31, ([0], []), ([0], [])),  # then one of the second: 27 weights in, 2 of batch norm, 2 out
        (38 + 31 + 31, ([0], []), ([0], [0])),
        (38 + 31 + 31 + 56, ([0], [0]), ([0], [0])),  # the first layer's channels now lead to five
        (10**6, ([0, 1], [0]), ([0, 1, 2], [0, 1])),
    ],
)
def test_candidates_are_taken_by_score_over_all_layers(num_added, first, second):
    assert select_candidates([FIRST, SECOND], CHANNELS, PARAMETERS, num_added) == [
        KeptCandidates(*first),
        KeptCandidates(*second),
    ]


@pytest.mark.parametrize(("num_added", "taken"), [(18, 0), (19, 1), (38, 1), (53, 1), (54, 2), (69, 2)])
def test_selection_stops_as_near_to_the_asked_size_as_whole_channels_allow(num_added, taken):
    growth = select_candidates([FIRST, SECOND], CHANNELS, PARAMETERS, num_added)
    assert sum(len(layer.split) + len(layer.new) for layer in growth) == taken


@pytest.mark.parametrize(
    ("num_added", "first", "second"),
    [(0, ([], []), ([], [])), (3, ([0], []), ([0], [0])), (5, ([0], [0]), ([0, 1], [0]))],
)
def test_a_number_of_neurons_is_taken_by_score_over_all_layers(num_added, first, second):
    assert select_candidates([FIRST, SECOND], CHANNELS, NEURONS, num_added) == [
        KeptCandidates(*first),
        KeptCandidates(*second),
    ]


@pytest.mark.parametrize("seed", range(5))
def test_every_candidate_that_is_kept_scores_better_than_any_that_is_not(seed):
    draw = random.Random(seed)
    scores = [
        LayerScores(split=[draw.random() for _ in range(draw.randint(1, 6))], new=[draw.random() for _ in range(3)])
        for _ in range(8)
    ]
    channels = [len(layer.split) for layer in scores]
    growth = select_candidates(scores, channels, size_of_chain("parameters", 3, 10), 900)
    kept, left = [], []
    for of_layer, of_growth in zip(scores, growth, strict=True):
        for values, indices in zip(of_layer[:2], of_growth[:2], strict=True):
            assert indices == sorted(set(indices))
            for index, value in enumerate(values):
                (kept if index in indices else left).append(value)
    assert kept and left and max(kept) < min(left)
