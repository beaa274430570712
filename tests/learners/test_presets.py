"""Values of presets, and their precedence."""

import pytest

from fairseq_alma.images.image_job import ImageTrainOptions
from fairseq_alma.learners.learner import LEARNERS, PAPER, RELEASED_CODE
from fairseq_alma.options import options_of

IMAGES = LEARNERS["images"]


def train_options(learner, words, preset, for_photographs=False):
    return ImageTrainOptions(words, IMAGES[learner], for_photographs, preset)


@pytest.mark.parametrize("learner", IMAGES)
@pytest.mark.parametrize("for_photographs", [False, True])
def test_the_papers_preset_equals_the_defaults(learner, for_photographs):
    found, plain = (train_options(learner, [], preset, for_photographs) for preset in (PAPER, None))
    assert found.values == plain.values
    for name, value in PAPER.learners.get(learner, {}).items():
        assert options_of(IMAGES[learner])[name].default_on("images") == value


@pytest.mark.parametrize(
    ("learner", "gain", "patience"),
    [("sm", 0.001, ("25",)), ("gens", 0.001, ("25",)), ("gmoe", 0.001, ("25",)),
     ("moe", 0.001, None), ("ens", 0.0, None), ("umix", 0.0, None), ("bagging", 0.0, None)],
)  # fmt: skip
def test_the_released_code_selects_by_accuracy_and_stops_some_learners_after_25_epochs(learner, gain, patience):
    found = train_options(learner, [], RELEASED_CODE)
    assert (found.loop.select, found.loop.least_gain, found.values.get("--patience")) == ("accuracy", gain, patience)
    assert "--last-pool" not in found.values
    of_vgg = train_options(learner, [], RELEASED_CODE, for_photographs=True)
    assert (of_vgg.values.get("--last-pool"), of_vgg.values.get("--initial-weights")) == (("max",), ("default",))
