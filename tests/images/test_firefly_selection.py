import random
from functools import partial

import pytest

from fairseq_alma.images.firefly import KeptCandidates, LayerScores, select_candidates, vgg_size

# Images of 1 channel, layers of 2 and 3 channels, 2 classes: 18 + 54 weights, 10 of batch norm, 8 of the classifier.
FIRST = LayerScores(split=[-5.0, 0.1], new=[-1.0])
SECOND = LayerScores(split=[-4.0, -0.5, 0.0], new=[-3.0, 2.0])
CHANNELS = [2, 3]
PARAMETERS, NEURONS = (partial(vgg_size, 1, num_classes=2, share_of=share_of) for share_of in ("parameters", "neurons"))


@pytest.mark.parametrize(
    ("size", "num_added", "first", "second"),
    [
        (PARAMETERS, 0, ([], []), ([], [])),
        (PARAMETERS, 38, ([0], []), ([], [])),  # first layer, per channel: 9 weights in, 27 out, 2 of batch norm
        (PARAMETERS, 38 + 31, ([0], []), ([0], [])),  # second layer, per channel: 27 in, 2 of batch norm, 2 out
        (PARAMETERS, 38 + 31 + 31, ([0], []), ([0], [0])),
        (PARAMETERS, 38 + 31 + 31 + 56, ([0], [0]), ([0], [0])),  # the second layer now has 5 channels
        (PARAMETERS, 10**6, ([0, 1], [0]), ([0, 1, 2], [0, 1])),
        (NEURONS, 0, ([], []), ([], [])),
        (NEURONS, 3, ([0], []), ([0], [0])),
        (NEURONS, 5, ([0], [0]), ([0, 1], [0])),
    ],
)
def test_candidates_are_selected_by_score_over_all_layers(size, num_added, first, second):
    kept = [KeptCandidates(*first), KeptCandidates(*second)]
    assert select_candidates([FIRST, SECOND], CHANNELS, size, num_added) == kept


@pytest.mark.parametrize(("num_added", "taken"), [(18, 0), (19, 1), (38, 1), (53, 1), (54, 2), (69, 2)])
def test_selection_stops_at_the_number_of_channels_closest_to_the_requested_size(num_added, taken):
    growth = select_candidates([FIRST, SECOND], CHANNELS, PARAMETERS, num_added)
    assert sum(len(layer.split) + len(layer.new) for layer in growth) == taken


@pytest.mark.parametrize("seed", range(5))
def test_each_selected_candidate_has_a_better_score_than_the_others(seed):
    draw = random.Random(seed)
    channels = [draw.randint(1, 6) for _ in range(8)]
    scores = [LayerScores([draw.random() for _ in range(size)], [draw.random() for _ in range(3)]) for size in channels]
    growth = select_candidates(scores, channels, partial(vgg_size, 3, num_classes=10), 900)
    kept, left = [], []
    for of_layer, of_growth in zip(scores, growth, strict=True):
        for values, indices in zip(of_layer[:2], of_growth[:2], strict=True):
            assert indices == sorted(set(indices))
            for index, value in enumerate(values):
                (kept if index in indices else left).append(value)
    assert kept and left and max(kept) < min(left)
