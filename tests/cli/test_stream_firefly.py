"""``alma-stream --learner firefly``: a tiny VGG network grows and trains on."""

import json

import pytest
import torch

from fairseq_alma.cli.stream import main
from fairseq_alma.images.firefly import vgg_size
from fairseq_alma.images.networks import NUM_CONVOLUTIONS, VGG, count_flops
from tests.images.image_streams import NUM_CLASSES, make_stream

SHAPE, FIRST = (3, 16, 16), [3] * NUM_CONVOLUTIONS
WORDS = ("--", "--arch", "alma_firefly_vgg", "--channels", "3", "--max-epoch", "2", "--batch-size", "16", "--cpu")


def channels_of(run):
    config = torch.load(run / "stage-001/member-0/checkpoint_last.pt", weights_only=True)["cfg"]["model"]
    return [int(number) for number in config["layer_channels"].split(",")]


def test_the_second_stage_has_a_quarter_more_parameters_and_records_the_cost_and_loss_of_growth(tmp_path):
    stream, run = make_stream(tmp_path / "S", num_megabatches=2, num_train=80, shape=SHAPE), tmp_path / "R"
    assert main(["--stream", str(stream), "--run", str(run), "--learner", "firefly", *WORDS]) == 0
    first, second = (json.loads((run / f"stage-00{stage}/stage.json").read_text()) for stage in (0, 1))
    size = vgg_size(SHAPE[0], FIRST, NUM_CLASSES)
    assert first["num_params"] == size and "after_growth" not in first
    assert second["num_params"] == vgg_size(SHAPE[0], channels_of(run), NUM_CLASSES)
    assert second["num_params"] == pytest.approx(1.25 * size, rel=0.05)
    before, after = (second[name]["valid"]["loss"] for name in ("before_growth", "after_growth"))
    assert after == pytest.approx(before, rel=0.1)
    per_image = [count_flops(VGG(SHAPE, NUM_CLASSES, channels), SHAPE).train for channels in (FIRST, channels_of(run))]
    assert first["train_flops"] == first["train_images"] * per_image[0] and "growth_flops" not in first
    assert second["growth_flops"] > 0
    assert second["train_flops"] == second["train_images"] * per_image[1] + second["growth_flops"]
