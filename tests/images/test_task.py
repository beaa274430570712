"""The task behind fairseq's own commands, on a small stream of images."""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fairseq.models import MODEL_DATACLASS_REGISTRY
from omegaconf import OmegaConf

import fairseq_alma
from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint, write_checkpoint
from fairseq_alma.cli.ensemble import main
from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.errors import AlmaError
from fairseq_alma.images.image_models import AlmaMLPConfig
from fairseq_alma.images.image_task import AlmaImageClassificationConfig, AlmaImageClassificationTask
from tests.images.image_streams import make_stream
from tests.scripts import run_script

fairseq_alma.register()

CLIPPING = str(Path(__file__).parents[1] / "training" / "clipping.py")


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return make_stream(tmp_path_factory.mktemp("images") / "S", num_megabatches=4, num_train=400)


def stock(folder, command, stream, *words):
    """Run a stock command of fairseq in a folder; return its output."""
    line = [command, str(stream), "--user-dir", os.path.dirname(fairseq_alma.__file__), "--cpu", "--num-workers", "0"]
    done = run_script([*line, "--task", "alma_image_classification", *words], cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(stream, tmp_path_factory):
    """Return a folder with a network that fairseq-train trained on mega-batches 2 and 3, and the output."""
    folder = tmp_path_factory.mktemp("trained")
    words = ["--megabatch", "3", "--wait", "2", "--criterion", "alma_image_cross_entropy", "--arch", "alma_mlp"]
    words += ["--width", "16", "--optimizer", "adadelta", "--lr", "1.0", "--max-epoch", "12", "--batch-size", "32"]
    words += ["--no-epoch-checkpoints", "--log-format", "simple", "--save-dir", "model"]
    words += ["--features-from", CLIPPING, "--clip-weights", "0.4", "--ema-half-life", "1/8"]
    return folder, stock(folder, "fairseq-train", stream, *words)


def plain_network(checkpoint):
    """Return a function that computes the network from its weights with matrix products only."""
    weights = list(torch.load(checkpoint, weights_only=True)["model"].values())

    def forward(images):
        x = images.flatten(1)
        for weight, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
            x = (x @ weight[0].T + bias[0]).clamp(min=0)
        return x @ weights[-2][0].T + weights[-1][0]

    return forward


def test_the_stock_commands_train_a_stage_and_find_the_error_of_a_plain_computation(stream, trained):
    folder, printed = trained
    checkpoint = folder / "model/checkpoint_last.pt"
    images = ImageStream.open(stream)
    rows = images.indices("test")
    pixels = (torch.from_numpy(images.images[rows]) / 255 - images.mean[0]) / images.std[0]
    logits, labels = plain_network(checkpoint)(pixels), torch.from_numpy(images.labels[rows])
    error = (logits.argmax(dim=1) != labels).float().mean().item()
    assert error < 0.3  # of 0.75 by chance
    words = ["--path", str(checkpoint), "--valid-subset", "test", "--batch-size", "30"]  # 100 is no multiple of it
    lines = stock(folder, "fairseq-validate", stream, *words).splitlines()
    line = next(line for line in lines if "valid on 'test' subset" in line)
    assert float(re.search(r"\berror ([\d.]+)", line)[1]) == pytest.approx(error, abs=1e-4)
    loss = float(re.search(r"\bloss ([\d.]+)", line)[1])
    assert loss == pytest.approx(F.cross_entropy(logits, labels).item(), abs=2e-3)
    assert f"num_updates {12 * 6}" in printed  # 2 mega-batches of 90 images in batches of 32


def test_the_features_of_a_training_are_those_of_the_stock_command_too(stream, trained):
    folder, _ = trained
    checkpoint = read_checkpoint(folder / "model/checkpoint_last.pt")
    state, weights = checkpoint["extra_state"]["AlmaImageClassificationTask"], checkpoint["model"]
    assert (state["clipped_updates"], state["train_tokens"]) == (12 * 6, 12 * 180)
    assert max(float(tensor.abs().max()) for tensor in weights.values()) == pytest.approx(0.4)
    assert main([str(folder / "model/checkpoint_last.pt"), "--average", "--out", str(folder / "average.pt")]) == 0
    averaged = read_checkpoint(folder / "average.pt")["model"]
    assert all(torch.equal(tensor, state["average"][name]) for name, tensor in averaged.items())
    assert not all(torch.equal(tensor, weights[name]) for name, tensor in averaged.items())


def task_of(stream, **options):
    cfg = AlmaImageClassificationConfig(data=str(stream), seed=1, path=None, cpu=True, continue_once=None, **options)
    cfg.finetune_from_model, cfg.restore_file, cfg.save_dir = None, "checkpoint_last.pt", "nowhere"
    cfg.checkpoint_suffix = ""
    return AlmaImageClassificationTask.setup_task(OmegaConf.structured(cfg))


def rows_of(stream, split, **options):
    task = task_of(stream, **options)
    task.load_dataset(split)
    return task.dataset(split).indices.tolist()


def test_a_stage_has_the_images_of_its_mega_batches(stream):
    images, replay = ImageStream.open(stream), {"megabatch": 2, "replay": True}
    stages = [({"megabatch": 3, "wait": 2}, [2, 3]), (replay, [0, 1, 2]), ({"megabatch": 3, "wait": 3}, [3])]
    for options, megabatches in stages:
        assert rows_of(stream, "train", **options) == images.indices("train", megabatches).tolist()
        assert rows_of(stream, "valid", **options) == images.indices("valid", megabatches).tolist()
        assert rows_of(stream, "test", **options) == images.indices("test").tolist()


def test_without_a_stage_valid_is_that_of_all_mega_batches_and_what_does_not_exist_is_refused(stream):
    assert rows_of(stream, "valid") == ImageStream.open(stream).indices("valid", range(4)).tolist()
    with pytest.raises(AlmaError, match="--megabatch: missing; give the index"):
        rows_of(stream, "train")
    with pytest.raises(AlmaError, match="--megabatch 1"):
        rows_of(stream, "train", megabatch=1, wait=3)
    with pytest.raises(AlmaError, match="'dev'"):
        rows_of(stream, "dev")


def test_an_architecture_of_text_and_a_missing_batch_size_are_refused(stream):
    with pytest.raises(AlmaError, match=r"--arch transformer_lm: not an image model; choose from .*alma_mlp"):
        task_of(stream).build_model(OmegaConf.structured(AlmaMLPConfig(_name="transformer_lm")))
    with pytest.raises(AlmaError, match="--batch-size: not given"):
        task_of(stream).get_batch_iterator(None)


def test_a_checkpoint_of_another_size_is_refused_before_training_goes_on_from_it(stream, trained):
    folder, _ = trained
    task = task_of(stream)
    task.cfg.save_dir = str(folder / "model")
    message = r"checkpoint_last\.pt: the model sizes in this file differ from the command line; .*width 16"
    with pytest.raises(AlmaError, match=message):
        task.build_model(OmegaConf.structured(AlmaMLPConfig(_name="alma_mlp", width=5)))


@pytest.mark.parametrize(
    ("arch", "trained_with", "flag"),
    [
        ("alma_moe_vgg", {"gate": "hard", "last_pool": "max"}, "--gate 'hard' --last-pool 'max'"),
        ("alma_umix", {"member_options": "--channels 4 --last-pool max"}, "--last-pool 'max' in --member-options"),
    ],
)
def test_a_checkpoint_with_other_options_but_equal_sizes_is_refused(arch, trained_with, flag, tmp_path):
    large = make_stream(tmp_path / "S", num_megabatches=2, num_train=40, shape=(3, 32, 32))
    members = {"num_members": 2, "member_arch": "alma_vgg", "member_options": "--channels 4"}
    sizes = members if arch == "alma_umix" else {"channels": 4}
    task, start = task_of(large), tmp_path / "checkpoint.pt"
    config_class = MODEL_DATACLASS_REGISTRY[arch]
    configs = [OmegaConf.structured(config_class(_name=arch, **{**sizes, **own})) for own in (trained_with, {})]
    model = task.build_model(configs[0])
    saved = OmegaConf.to_container(configs[0], enum_to_str=True)
    config = {"model": saved, "task": {"_name": "alma_image_classification"}}
    write_checkpoint({"cfg": config, "model": model.state_dict()}, start)
    task.cfg.finetune_from_model = str(start)
    with pytest.raises(AlmaError, match=re.escape(flag)):
        task.build_model(configs[1])
    assert task.build_model(configs[0]) is not None
