import pytest
import torch

import fairseq_alma
from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.images.image_job import ImageTrainOptions
from fairseq_alma.images.model_store import ImageSettings
from fairseq_alma.learners.learner import SingleModel
from tests.images.image_streams import make_stream

fairseq_alma.register()


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return ImageStream.open(make_stream(tmp_path_factory.mktemp("images") / "S", num_megabatches=2, num_train=40))


def settings_of(images, *words):
    return ImageSettings(images, ImageTrainOptions([*words, "--cpu"], SingleModel, for_photographs=False))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--batch-size", "0"], "--batch-size 0: expected a number of at least 1"),
        (["--lr", "0"], "--lr 0: expected a number above 0"),
        (["--lr", "[0.1,0.2]"], r"--lr \[0\.1,0\.2\]: expected a number"),
        (["--select", "speed"], "--select speed: choose from loss, accuracy"),
        (["--least-gain", "1.5"], r"--least-gain 1\.5: expected a number of at most 1"),
        (["--width", "many"], "--width many: expected an integer"),
        (["--adadelta-rho", "2"], r"the optimizer adadelta rejects its options .*rho value: 2"),
        (["--width", "1000000"], "alma_mlp --width 1000000 does not fit into memory"),
        (["--arch"], "--arch after --: expected one architecture; give one name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_invalid_options_are_refused_in_one_line(words, reason, images):
    with pytest.raises(ValueError, match=reason) as error:
        settings_of(images, *words)
    assert "\n" not in str(error.value)


def test_the_optimizer_of_a_stage_is_the_one_that_fairseq_builds(images):
    words = ["--optimizer", "adam", "--lr", "0.1", "--adam-betas", "(0.5, 0.6)", "--weight-decay", "0.25"]
    parameter = torch.nn.Parameter(torch.zeros(2))
    (group,) = settings_of(images, *words).build_optimizer([parameter]).param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.1, (0.5, 0.6), 0.25)
    assert group["params"] == [parameter]
