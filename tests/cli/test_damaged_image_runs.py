"""``alma-stream`` reports weights that it has not written."""

import json
import shutil

import pytest
import torch

from fairseq_alma.cli.stream import main
from fairseq_alma.errors import AlmaError
from fairseq_alma.images import model_store
from tests.images.image_streams import make_stream

WORDS = ("--", "--width", "6", "--max-epoch", "2", "--cpu")
CHECKPOINT, UNFINISHED = "stage-000/member-0/checkpoint_last.pt", "stage-001/member-0/training.pt"


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return make_stream(tmp_path_factory.mktemp("images") / "S", num_megabatches=2, num_train=60)


@pytest.fixture(scope="module")
def begun(stream, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "R"
    resume(stream, folder, "--stage", "0")
    return folder


@pytest.fixture
def run(begun, tmp_path):
    return shutil.copytree(begun, tmp_path / "R")


def resume(stream, folder, *options):
    assert main(["--stream", str(stream), "--run", str(folder), *options, *WORDS]) == 0


def refused(stream, folder):
    """Return the line with which the next stage fails."""
    with pytest.raises(AlmaError) as error:
        resume(stream, folder)
    assert "\n" not in str(error.value)
    assert not (folder / "stage-001/stage.json").exists()
    return str(error.value)


def test_the_advice_of_the_message_lets_the_run_complete(stream, run, tmp_path, monkeypatch):
    whole, reads = shutil.copytree(run, tmp_path / "whole"), []
    read = model_store.read_model
    monkeypatch.setattr(model_store, "read_model", lambda path, *how: reads.append(path) or read(path, *how))
    resume(stream, whole)
    assert reads == [whole / CHECKPOINT]
    (run / CHECKPOINT).write_bytes((run / CHECKPOINT).read_bytes()[:-300])
    assert f"stage.json to complete the stage again or, if it fails, {run / 'stage-000'} to" in refused(stream, run)
    shutil.rmtree(run / "stage-000")
    resume(stream, run)
    found, expected = (json.loads((folder / "stage-001/stage.json").read_text()) for folder in (run, whole))
    assert found["test"] == expected["test"]


@pytest.mark.parametrize("name", ["branch/checkpoint_last.pt", "checkpoint_last.pt"])
def test_weights_of_another_run_are_reported_with_the_stage_to_remove(name, stream, tmp_path):
    words = ["--learner", "sm", "--branch-share", "0.5", *WORDS, "--arch", "alma_moe_mlp"]
    for folder, own in (("R", ()), ("other", ("--num-experts", "2"))):
        assert main(["--stream", str(stream), "--run", str(tmp_path / folder), "--stage", "0", *words, *own]) == 0
    stage = tmp_path / "R/stage-000"
    (stage / "stage.json").unlink()
    path = shutil.copy(tmp_path / "other/stage-000/member-0" / name, stage / "member-0" / name)
    with pytest.raises(
        AlmaError, match=f"^{path}: the checkpoint has .* wrong shape .*; remove the stage folder {stage} to train"
    ):
        main(["--stream", str(stream), "--run", str(stage.parent), *words])


def test_a_foreign_unfinished_training_is_reported_with_a_remedy(stream, run):
    (run / UNFINISHED).parent.mkdir(parents=True)
    torch.save({"seeds": [1], "epoch": 1, "network": {}}, run / UNFINISHED)
    said = refused(stream, run)
    assert f"{run / UNFINISHED}: the training state does not match the options of this run" in said
    assert "remove the file to restart the stage" in said
    (run / UNFINISHED).unlink()
    resume(stream, run)
