"""No code in a checkpoint runs; a truncated or foreign file is rejected in one line."""

import io
import os
import pickle
import zipfile
from argparse import Namespace
from functools import partial

import pytest
import torch
from fairseq import models
from omegaconf import OmegaConf

from fairseq_alma.checkpoints.checkpoint_file import DICTIONARY_KEY, ENSEMBLE_ARCH, SINGLE_MODELS, read_checkpoint
from fairseq_alma.cli.ensemble import main as alma_ensemble
from fairseq_alma.cli.grow import main as alma_grow
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.text.stage_checkpoints import describe_checkpoint
from fairseq_alma.training.stage_task import load_state
from tests.checkpoints.small import small_checkpoint
from tests.models.ensembles import switch_config, task_of
from tests.scripts import run_script
from tests.text.stock_commands import TOKENS_PER_SAMPLE, evaluate, prepare_stream, training_words

CANARY, UMIX = "canary", {"_name": "alma_umix", "member_arch": "alma_switch_lm_tiny"}


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def code(folder):
    """Return an expression that creates the canary file."""
    return f"open({str(folder / CANARY)!r}, 'w').close() or [(8, 1)]"


def calls(part, checkpoint, folder):
    (checkpoint[part] if part else checkpoint)["x"] = Calls(os.mkdir, str(folder / CANARY))


def stock(arch, options, checkpoint, folder):
    """Insert a stock architecture with options that fairseq evaluates: ``CODE`` becomes an expression."""
    given = {name: code(folder) if value == "CODE" else value for name, value in options.items()}
    checkpoint["cfg"]["model"] = {**checkpoint["cfg"]["model"], "_name": arch, **given}


def options_namespace(checkpoint, folder):
    options = {**checkpoint["cfg"]["model"], "task": "alma_lm", "arch": "fconv_lm", "decoder_layers": code(folder)}
    checkpoint["args"] = Namespace(**options)


def joined(config):
    """Return the configuration of an ensemble with one embedded member."""
    entry = {"weight": 1.0, "sha256": "0" * 64, "origin": "m.pt", "config": config}
    return {"_name": "alma_ensemble", "vocab_size": 300, "members": [entry]}


def embedded(change, checkpoint, folder):
    """Turn the checkpoint into an ensemble with one changed, embedded member."""
    change(checkpoint, folder)
    checkpoint["cfg"]["model"] = joined(checkpoint["cfg"]["model"])
    checkpoint["model"] = {f"decoder.members.0.{name}": tensor for name, tensor in checkpoint["model"].items()}


CHARACTERS = {"character_embeddings": True, "character_filters": "CODE", "activation_fn": "relu"}
KINDS = {
    "call in the file": partial(calls, None),
    "call in the configuration": partial(calls, "cfg"),
    "call in the weights": partial(calls, "model"),
    "args": options_namespace,
    "fconv_lm": partial(stock, "fconv_lm", {"decoder_layers": "CODE", "decoder_attention": "CODE"}),
    "lightconv_lm": partial(stock, "lightconv_lm", CHARACTERS),
    "wav2vec": partial(stock, "wav2vec2", {"conv_feature_layers": "CODE"}),
    "character_filters": partial(stock, "transformer_lm", CHARACTERS),
    "adaptive_input": partial(stock, "transformer_lm_gpt", {"adaptive_input": True, "adaptive_input_cutoff": "CODE"}),
    "adaptive_softmax": partial(stock, "transformer_lm", {"adaptive_softmax_cutoff": "CODE"}),
    "xformers": partial(stock, "transformer_lm", {"decoder_xformers_att_config": "CODE"}),
    "member": partial(embedded, partial(stock, "transformer_lm", CHARACTERS)),
}
"""Functions that hide code in a valid checkpoint; their last argument is the folder of the canary file."""


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return prepare_stream(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def content(stream):
    """Return a function that builds the checkpoint of an untrained model in the format of fairseq-train."""
    config = {**switch_config(decoder_layers=2, num_experts=2), "tokens_per_sample": TOKENS_PER_SAMPLE}
    num_tokens = len((stream / "dict.txt").read_text().splitlines())
    model = models.build_model(OmegaConf.create(config), task_of(num_tokens=num_tokens))
    task = {"_name": "alma_lm", "data": str(stream), "tokens_per_sample": TOKENS_PER_SAMPLE}
    cfg = {"model": config, "task": task, "criterion": {"_name": "alma_switch_cross_entropy", "sentence_avg": False}}
    state = {DICTIONARY_KEY: Stream.open(stream).dictionary_sha256}
    build = partial(small_checkpoint, last_optimizer_state=None, task_state=state)
    return lambda: build(cfg=dict(cfg), model=dict(model.state_dict()))


def refused(read, path):
    """Return the error message of a reader for a file, after a check that no code ran."""
    with pytest.raises(AlmaError) as error:
        read(path)
    line = str(error.value)
    assert str(path) in line and "\n" not in line and "weights_only" not in line
    assert not (path.parent / CANARY).exists()
    return line


READERS = {
    "gate": read_checkpoint,
    "fairseq": load_state,
    "facts": describe_checkpoint,
    "alma-grow": lambda path: alma_grow(
        ["--path", str(path), "--out", f"{path}.out", "--method", "copy", "--experts", "1", "--select", "random"]
    ),
    "alma-ensemble": lambda path: alma_ensemble([str(path), "--out", f"{path}.out"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_reader_runs_code_in_a_checkpoint(content, tmp_path, kind):
    checkpoint, path = content(), tmp_path / "hostile.pt"
    KINDS[kind](checkpoint, tmp_path)
    torch.save(checkpoint, path)
    lines = [refused(read, path) for read in READERS.values()]
    assert all(f"objects ({os.name}.mkdir) other than" in line for line in lines) == kind.startswith("call")
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("command", ["fairseq-eval-lm", "fairseq-validate", "fairseq-train"])
def test_no_stock_command_runs_code_in_a_checkpoint(stream, content, tmp_path, command):
    checkpoint, path = content(), tmp_path / "hostile.pt"
    KINDS["character_filters"](checkpoint, tmp_path)
    torch.save(checkpoint, path)
    words = [str(stream), "--task", "alma_lm", "--path", str(path), "--cpu", "--batch-size", "4"]
    if command == "fairseq-train":
        words = training_words(stream, "--megabatch", "0", "--finetune-from-model", str(path), "--no-save")
    done = run_script([command, *words, "--user-dir", "fairseq_alma"])
    assert done.returncode == 1 and str(path) in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr + done.stdout and not (tmp_path / CANARY).exists()


def test_the_unchanged_checkpoint_is_accepted(stream, content, tmp_path):
    torch.save(content(), tmp_path / "good.pt")
    assert evaluate(stream, tmp_path / "good.pt")["loss"] > 0


def foreign_zip(_):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("a.txt", "text")
    return archive.getvalue()


DAMAGE = {
    "empty": lambda _: b"",
    "text": lambda _: b"no checkpoint",
    "pickle": pickle.dumps,
    "zip": foreign_zip,
    "truncated": lambda whole: whole[:-100],
    "one bit": lambda whole: whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_truncated_damaged_or_foreign_file_is_rejected_in_one_line(content, tmp_path, kind):
    torch.save(content(), tmp_path / "good.pt")
    path = tmp_path / "bad.pt"
    path.write_bytes(DAMAGE[kind]((tmp_path / "good.pt").read_bytes()))
    for name in ("gate", "fairseq", "alma-ensemble"):
        refused(READERS[name], path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.pop("model"), "lacks 'model' or 'cfg.model'"),
        (lambda c: c.pop("cfg"), "lacks 'model' or 'cfg.model'"),
        (lambda c: c["model"].update(x=[1.0]), "not a dictionary of weights"),
        (lambda c: c["cfg"]["model"].update(_name="lstm_lm"), "found lstm_lm"),
        (lambda c: c["cfg"]["model"].update(mup=True), "trained with --mup"),
        (lambda c: c["cfg"]["model"].update(group_layers="3,2,4,4,4"), "0.2.0 supports Firefly networks that"),
        (lambda c: c["cfg"].update(model=UMIX), "0.2.0 supports UMix of language models; train"),
        (lambda c: c["cfg"].update(model=joined(joined(c["cfg"]["model"]))), "ensembles of ensembles"),
    ],
)
def test_an_unsupported_checkpoint_is_rejected(content, tmp_path, change, named):
    checkpoint = content()
    checkpoint["cfg"] = {**checkpoint["cfg"], "model": dict(checkpoint["cfg"]["model"])}
    change(checkpoint)
    torch.save(checkpoint, tmp_path / "c.pt")
    assert named in refused(read_checkpoint, tmp_path / "c.pt")


def test_the_allow_list_contains_each_architecture_of_this_package():
    ours = {name for name in models.ARCH_MODEL_REGISTRY if name.startswith("alma_")}
    assert ours == {ENSEMBLE_ARCH, "alma_umix", *(name for name in SINGLE_MODELS if name.startswith("alma_"))}
