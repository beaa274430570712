"""Options after ``--`` that make no training: one line each, before anything is written."""

import pytest
import torch

import fairseq_alma
from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.images.image_settings import ImageSettings
from fairseq_alma.images.image_train_options import ImageTrainOptions
from fairseq_alma.learners.learner import SingleModel
from tests.images.image_streams import make_stream

fairseq_alma.register()

ADAM = ["--optimizer", "adam", "--lr", "0.1"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return ImageStream.open(make_stream(tmp_path_factory.mktemp("images") / "S", num_megabatches=2, num_train=40))


def settings_of(images, *words):
    return ImageSettings(images, ImageTrainOptions([*words, "--cpu"], SingleModel, for_photographs=False))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch-size", "0"], "--batch-size 0 after the --: a whole number of at least 1 is needed"),
        (["--lr", "-1"], "--lr -1 after the --: a number above 0 is needed"),
        (["--lr", "0"], "--lr 0 after the --: a number above 0 is needed"),
        (["--lr", "[0.1,0.2]"], r"--lr \[0\.1,0\.2\] after the --: one number is needed"),
        (["--lr", ""], "--lr  after the --: a number is needed"),
        (["--lr", "abc"], "--lr abc after the --: a number is needed"),
        (["--weight-decay", "-1"], "--weight-decay -1 after the --: a number of at least 0 is needed"),
        (["--adadelta-rho", "2"], "--adadelta-rho 2 after the --: a number of at most 1 is needed"),
        (
            ["--optimizer", "sgd", "--lr", "0.1", "--momentum", "-1"],
            "--momentum -1 after the --: a number of",
        ),
        ([*ADAM, "--adam-betas", "oops"], "--adam-betas oops after the --: two numbers"),
        ([*ADAM, "--adam-betas", "(2,3)"], r"--adam-betas \(2,3\) after the --: two numbers from 0 to 1"),
        ([*ADAM, "--adam-betas", "0.9"], r"--adam-betas 0\.9 after the --: two numbers"),
        (["--width", "1000000"], "alma_mlp --width 1000000 does not fit into memory"),
        (["--width", "1000000000"], "--width 1000000000 after the --: a whole number of at most 1,000,000 is needed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_makes_no_training_is_refused_in_one_line(words, said, images):
    with pytest.raises(ValueError, match=said) as error:
        settings_of(images, *words)
    assert "\n" not in str(error.value)


def test_what_stands_in_adam_betas_is_not_run(images, tmp_path):
    with pytest.raises(ValueError, match="two numbers"):
        settings_of(images, *ADAM, "--adam-betas", f"open({str(tmp_path / 'x')!r}, 'w')")
    assert not (tmp_path / "x").exists()


def test_an_architecture_without_a_name_is_refused():
    with pytest.raises(ValueError, match="--arch after the --: one name is needed"):
        ImageTrainOptions(["--arch"], SingleModel, for_photographs=False)


def test_the_optimizer_of_a_stage_is_the_one_that_fairseq_builds(images):
    settings = settings_of(images, *ADAM, "--adam-betas", "(0.5, 0.6)", "--weight-decay", "0.25")
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = settings.training().build_optimizer([parameter])
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.1, (0.5, 0.6), 0.25)
    assert group["params"] == [parameter]
