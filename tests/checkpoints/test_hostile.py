"""Every reader answers every hostile checkpoint with one line, and nothing in it runs."""

import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fairseq import models, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import generate, interactive, validate
from omegaconf import OmegaConf

from fairseq_alma.checkpoints.checkpoint_file import DICTIONARY_KEY, read_checkpoint
from fairseq_alma.checkpoints.model_facts import describe_checkpoint
from fairseq_alma.cli.ensemble import main as alma_ensemble
from fairseq_alma.cli.grow import main as alma_grow
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.images.image_classifier import GrownLayers
from fairseq_alma.images.model_store import read_model
from fairseq_alma.text.stage_checkpoints import read_progress
from fairseq_alma.training.loading import load_state, refuse_other_weights
from tests.checkpoints import hostile
from tests.checkpoints.small import small_checkpoint
from tests.models.ensembles import switch_config, task_of
from tests.scripts import run_script
from tests.text.stock_commands import TOKENS_PER_SAMPLE, evaluate, prepare_stream, train_model

PATIENCE = 60.0  # seconds; a file that keeps a reader longer than that is one that hangs it
OF_EVAL_LM = (
    *("args", "calls", "character_filters", "member character_filters", "adaptive_softmax", "environment", "layers"),
    *("deep tree", "nan", "missing expert", "nan weight", "link"),
)


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return prepare_stream(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def good(stream):
    """A checkpoint of an untrained model, as fairseq-train writes them."""
    config = {**switch_config(decoder_layers=2, num_experts=2), "tokens_per_sample": TOKENS_PER_SAMPLE}
    num_tokens = 4 + len((stream / "dict.txt").read_text().splitlines())
    model = models.build_model(OmegaConf.create(config), task_of(num_tokens=num_tokens - 4))
    path = stream.parent / "good.pt"
    task = {"_name": "alma_lm", "data": str(stream), "tokens_per_sample": TOKENS_PER_SAMPLE}
    cfg = {"model": config, "task": task, "criterion": {"_name": "alma_switch_cross_entropy", "sentence_avg": False}}
    content = small_checkpoint(cfg=cfg, model=model.state_dict(), last_optimizer_state=None)
    content["task_state"] = {DICTIONARY_KEY: Stream.open(stream).dictionary_sha256}
    content["extra_state"]["AlmaLMTask"] = {"train_tokens": 1}
    torch.save(content, path)
    return path


def answer(read, path):
    """Return the one line that a reader answers a file with."""
    began = time.process_time()  # not the time of day: other work must not decide
    with pytest.raises(AlmaError) as error:
        read(path)
    line = str(error.value)
    assert time.process_time() - began < PATIENCE
    assert "\n" not in line and "weights_only" not in line and len(line) < 2000
    assert not (path.parent / hostile.CANARY).exists()
    return line


READERS = {
    "gate": read_checkpoint,
    "fairseq": load_state,
    "progress": read_progress,
    "facts": describe_checkpoint,
    "alma-grow": lambda path: alma_grow(
        ["--path", str(path), "--out", f"{path}.out", "--method", "copy", "--experts", "1", "--select", "random"]
    ),
    "alma-ensemble": lambda path: alma_ensemble([str(path), "--out", f"{path}.out"]),
}


@pytest.mark.parametrize("kind", [*hostile.FILES, *hostile.CONTENTS])
def test_every_reader_answers_in_one_line(good, tmp_path, kind):
    path = hostile.make(kind, good, tmp_path)
    for read in READERS.values():
        assert str(path) in answer(read, path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("kind", hostile.REFERRING)
def test_an_ensemble_of_other_files_than_those_that_were_joined_is_refused(good, tmp_path, kind):
    path = hostile.make(kind, good, tmp_path)
    for name in ("facts", "alma-ensemble"):
        answer(READERS[name], path)


@pytest.mark.parametrize("kind", hostile.BUILT)
def test_what_fairseq_would_set_up_or_look_for_is_checked(good, tmp_path, kind):
    answer(load_state, hostile.make(kind, good, tmp_path))


@pytest.mark.parametrize("kind", hostile.COUNTS)
def test_a_stage_that_resumes_knows_how_far_it_was(good, tmp_path, kind):
    assert "remove" in answer(read_progress, hostile.make(kind, good, tmp_path))


@pytest.mark.parametrize("kind", [*OF_EVAL_LM, *hostile.REFERRING])
def test_fairseq_eval_lm_builds_nothing(stream, good, tmp_path, kind):
    path = hostile.make(kind, good, tmp_path)
    answer(lambda path: evaluate(stream, path), path)


def run(stream, parser, main, more, path):
    words = [str(stream), "--task", "alma_lm", "--path", str(path), "--cpu", "--num-workers", "0", *more]
    arguments = options.parse_args_and_arch(parser, words)
    main(convert_namespace_to_omegaconf(arguments), *([arguments] if main is validate.main else []))


@pytest.mark.parametrize("kind", [pytest.param("fconv_lm", marks=pytest.mark.slow), "flipped in a tensor"])
def test_every_command_of_fairseq_answers_in_one_line(stream, good, tmp_path, kind):
    path = hostile.make(kind, good, tmp_path)
    batch = ["--batch-size", "4"]
    for parser, main, more in (
        (options.get_validation_parser(), validate.main, [*batch, "--valid-subset", "test"]),
        (options.get_generation_parser(), generate.main, [*batch, "--gen-subset", "test"]),
        (options.get_interactive_generation_parser(), interactive.main, []),
    ):
        answer(partial(run, stream, parser, main, more), path)
    for start in (["--restore-file", str(path)], ["--finetune-from-model", str(path)], []):
        folder = tmp_path / f"save-{len(start) and start[0].strip('-')}"
        folder.mkdir()
        if not start:
            path.rename(folder / "checkpoint_last.pt")
        arguments = ["--megabatch", "0", "--num-experts", "2", "--decoder-layers", "2", *start]
        answer(lambda _, folder=folder, arguments=arguments: train_model(stream, folder, *arguments), path)


def test_the_good_checkpoint_that_they_were_made_of_is_taken(stream, good):
    assert evaluate(stream, good)["loss"] > 0
    assert read_progress(good).num_updates == 10


@pytest.mark.parametrize("kind", ["fconv_lm", pytest.param("flipped in a tensor", marks=pytest.mark.slow)])
def test_the_stock_command_itself_ends_with_status_1_and_one_line(stream, good, tmp_path, kind):
    path = hostile.make(kind, good, tmp_path)
    command = ["fairseq-eval-lm", str(stream), "--user-dir", "fairseq_alma", "--task", "alma_lm", "--cpu"]
    done = run_script([*command, "--path", str(path)])
    assert done.returncode == 1
    assert str(path) in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr + done.stdout and "weights_only" not in done.stderr + done.stdout
    assert not (tmp_path / hostile.CANARY).exists()


def test_ensembles_that_refer_to_ensembles_without_end_are_refused(good, tmp_path):
    def join_again_and_again(path):
        for level in range(20):
            alma_ensemble([str(path), "--out", str(tmp_path / f"{level}.pt")])
            path = tmp_path / f"{level}.pt"

    assert "more than 16 deep" in answer(join_again_and_again, good)
    describe_checkpoint(tmp_path / "16.pt")


@pytest.fixture
def image_model():
    config = {
        "_name": "alma_moe_mlp",
        "width": 4,
        "hidden_layers": 2,
        "num_experts": 2,
        "gate_trees": "[[0,1],[[0,1]]]",
    }
    return config, models.build_model(OmegaConf.create(config), SimpleNamespace(image_shape=(1, 3, 3), num_classes=5))


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"hidden_layers": 10_000_000}, {}),
        ({"hidden_layers": 3}, {}),
        ({"width": 5_000}, {}),
        ({"num_experts": 1 << 24}, {}),
        ({"gate_trees": "[" * 50_000}, {}),
        ({"_name": "alma_firefly_vgg", "layer_channels": ",".join(["16000000"] * 16)}, {}),
        ({"_name": "alma_firefly_vgg", "group_layers": "9999999,2,4,4,4"}, {}),
        ({"_name": "alma_firefly_vgg", "group_layers": "2,2,4,4,x"}, {}),
        ({"_name": "alma_umix", "num_members": 1000, "member_arch": "alma_mlp", "member_options": "--width 4"}, {}),
        ({}, {"network.blocks.0.linear.weight": lambda old: old * float("inf")}),
        ({}, {"network.blocks.0.linear.weight": lambda old: old.long()}),
        ({}, {"network.blocks.0.linear.weight": lambda old: old[:1].clone()}),
    ],
)
def test_checkpoints_of_image_models_are_looked_at_before_anything_is_built(image_model, tmp_path, options, change):
    config, built = image_model
    path = tmp_path / "stage-000/member-0/checkpoint_last.pt"
    path.parent.mkdir(parents=True)
    weights = dict(built.state_dict())
    torch.save(small_checkpoint(cfg={"model": config}, model=weights), path)
    assert load_state(path)["cfg"].model.width == 4
    weights.update({name: alter(weights[name]) for name, alter in change.items()})
    torch.save(small_checkpoint(cfg={"model": {**config, **options}}, model=weights), path)
    for read in (read_checkpoint, load_state, partial(read_model, read_grown=GrownLayers), READERS["alma-ensemble"]):
        assert str(path) in answer(read, path)


def test_weights_that_a_model_does_not_have_are_named_when_they_are_loaded(image_model):
    _, built = image_model
    refuse_other_weights(built, "E.pt")
    weights = built.state_dict()
    built.load_state_dict(weights)
    del weights["network.classifier.bias"]
    with pytest.raises(AlmaError, match=r"E\.pt: the checkpoint lacks 1 tensor\(s\), network\.classifier\.bias"):
        built.load_state_dict(weights)
