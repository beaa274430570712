"""``alma-stream --learner firefly`` from the command line to the files: a tiny VGG network grows and goes on."""

import json

import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_alma.cli.report import main as report
from fairseq_alma.cli.stream import main
from fairseq_alma.errors import AlmaError
from fairseq_alma.images.firefly import growth_flops, num_chain_parameters
from fairseq_alma.images.networks import NUM_CONVOLUTIONS, VGG, count_flops
from tests.images.image_streams import NUM_CLASSES, make_stream

SHAPE, FIRST = (3, 16, 16), [3] * NUM_CONVOLUTIONS
WORDS = ("--", "--arch", "alma_firefly_vgg", "--channels", "3", "--max-epoch", "2", "--batch-size", "16", "--cpu")


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return make_stream(tmp_path_factory.mktemp("images") / "S", num_megabatches=2, num_train=80, shape=SHAPE)


@pytest.fixture(scope="module")
def run(stream, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "R"
    assert main(["--stream", str(stream), "--run", str(folder), "--learner", "firefly", *WORDS]) == 0
    return folder


@pytest.fixture(scope="module")
def deeper(stream, tmp_path_factory):
    """A run of one call, and one of a call for each stage."""
    folders = [tmp_path_factory.mktemp("runs") / name for name in ("WHOLE", "PARTS")]
    command = ["--stream", str(stream), "--learner", "firefly", "--grow-in", "depth", "--run"]
    assert main([*command, str(folders[0]), *WORDS]) == 0
    for stage in ("0", "1"):
        assert main([*command, str(folders[1]), "--stage", stage, *WORDS]) == 0
    return folders


def weights_of(run):
    return torch.load(run / "stage-001/member-0/checkpoint_last.pt", weights_only=True)


def test_a_network_that_has_grown_in_depth_computes_what_it_did_and_is_what_its_checkpoint_says(deeper):
    run, _ = deeper
    second, content = record_of(run, 1), weights_of(run)
    groups = [int(number) for number in content["cfg"]["model"]["group_layers"].split(",")]
    assert sum(groups) == NUM_CONVOLUTIONS + 4 and channels_of(run) == [3] * sum(groups)
    size = num_chain_parameters(SHAPE[0], channels_of(run), NUM_CLASSES)
    assert (
        second["num_params"]
        == size
        == sum(each.numel() for name, each in content["model"].items() if "running" not in name)
    )
    before, after = (second[name]["valid"]["loss"] for name in ("before_growth", "after_growth"))
    assert after == pytest.approx(before, rel=1e-5)
    network = VGG(SHAPE, NUM_CLASSES, channels_of(run), groups=groups)
    grown = growth_flops(VGG(SHAPE, NUM_CLASSES, FIRST), FIRST[0], 0.25, second["train_images"] // 2, SHAPE, "depth")
    assert second["train_flops"] == second["train_images"] * count_flops(network, SHAPE).train + grown
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(run / "stage-001/member-0/checkpoint_last.pt")]
    )
    network.load_state_dict({name.removeprefix("network."): each for name, each in content["model"].items()})
    images = torch.randn(4, *SHAPE)
    assert torch.equal(model.eval()(images), network.eval()(images)[0]) and task.image_shape == SHAPE


def test_the_report_tells_growth_in_depth_from_growth_in_width(run, deeper, tmp_path, capsys):
    report([str(run), str(deeper[0]), "--out", str(tmp_path / "report")])
    assert "--grow-in depth" in capsys.readouterr().out


def test_a_run_in_depth_of_one_call_a_stage_has_the_weights_of_a_whole_one(deeper):
    whole, parts = (weights_of(run) for run in deeper)
    assert whole["cfg"]["model"] == parts["cfg"]["model"]
    assert all(torch.equal(each, parts["model"][name]) for name, each in whole["model"].items())


def record_of(run, stage):
    return json.loads((run / f"stage-{stage:03d}/stage.json").read_text())


def channels_of(run):
    config = torch.load(run / "stage-001/member-0/checkpoint_last.pt", weights_only=True)["cfg"]["model"]
    return [int(number) for number in config["layer_channels"].split(",")]


def test_the_second_stage_has_a_quarter_more_parameters_and_says_what_growth_did_to_the_loss(run):
    first, second = record_of(run, 0), record_of(run, 1)
    size = num_chain_parameters(SHAPE[0], FIRST, NUM_CLASSES)
    assert first["num_params"] == size and "after_growth" not in first
    assert second["num_params"] == num_chain_parameters(SHAPE[0], channels_of(run), NUM_CLASSES)
    assert second["num_params"] == pytest.approx(1.25 * size, rel=0.05)
    before, after = (second[name]["valid"]["loss"] for name in ("before_growth", "after_growth"))
    assert after == pytest.approx(before, rel=0.1)


def test_the_work_of_a_stage_is_its_training_and_its_growth(run):
    first, second = record_of(run, 0), record_of(run, 1)
    per_image = [count_flops(VGG(SHAPE, NUM_CLASSES, channels), SHAPE).train for channels in (FIRST, channels_of(run))]
    assert first["train_flops"] == first["train_images"] * per_image[0] and "growth_flops" not in first
    grown = growth_flops(VGG(SHAPE, NUM_CLASSES, FIRST), FIRST[0], 0.25, second["train_images"] // 2, SHAPE)  # 2 epochs
    assert second["growth_flops"] == grown > 0
    assert second["train_flops"] == second["train_images"] * per_image[1] + grown


@pytest.mark.parametrize(("options", "share"), [([], "0.0001"), (["--grow-in", "depth"], "0.03")])
def test_a_share_of_less_than_a_channel_or_a_layer_names_the_flag_and_leaves_nothing(stream, tmp_path, options, share):
    command = ["--stream", str(stream), "--run", str(tmp_path / "R"), "--learner", "firefly", *options]
    with pytest.raises(AlmaError, match=rf"^--grow-share {share}: .* less than one .* give a larger share") as error:
        main([*command, "--grow-share", share, *WORDS])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "R").exists()
