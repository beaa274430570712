"""``alma-ensemble`` of a run's image models, tested by the stock command, against the run's own figures."""

import json
import os
import re

import pytest

import fairseq_alma
from fairseq_alma.cli.ensemble import main as ensemble
from fairseq_alma.cli.stream import main as stream_command
from fairseq_alma.errors import AlmaError
from tests.images.image_streams import make_stream
from tests.scripts import run_script


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return make_stream(tmp_path_factory.mktemp("images") / "S", num_megabatches=2)


@pytest.fixture(scope="module")
def run(stream, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "R"
    words = ["--learner", "ens", "--num-members", "3", "--keep-checkpoints", "--", "--width", "6", "--max-epoch", "6"]
    assert stream_command(["--stream", str(stream), "--run", str(folder), *words, "--cpu"]) == 0
    return folder


def members_of(run, stage):
    return [str(run / f"stage-{stage:03d}/member-{member}/checkpoint_last.pt") for member in range(3)]


def validate(stream, path):
    """Return loss and error that the stock command prints for the test set."""
    words = ["fairseq-validate", str(stream), "--user-dir", os.path.dirname(fairseq_alma.__file__)]
    words += ["--task", "alma_image_classification", "--path", str(path), "--valid-subset", "test"]
    done = run_script([*words, "--batch-size", "30", "--cpu", "--num-workers", "0"])
    assert done.returncode == 0, done.stderr
    line = next(line for line in (done.stdout + done.stderr).splitlines() if "valid on 'test' subset" in line)
    return {name: float(re.search(rf"\b{name} ([\d.]+)", line)[1]) for name in ("loss", "error")}


def test_the_ensemble_of_a_stages_members_has_the_loss_and_error_of_its_record(stream, run, tmp_path):
    record = json.loads((run / "stage-001/stage.json").read_text())
    assert record["num_members"] == 3
    assert ensemble([*members_of(run, 1), "--out", str(tmp_path / "E.pt")]) == 0
    found = validate(stream, tmp_path / "E.pt")
    assert found["error"] == pytest.approx(record["test"]["error"], abs=1e-4)
    assert found["loss"] == pytest.approx(record["test"]["loss"], abs=2e-3)


def test_members_of_all_stages_are_kept_when_asked(run):
    assert all(os.path.isfile(path) for stage in (0, 1) for path in members_of(run, stage))


def test_models_of_other_images_do_not_make_an_ensemble(run, tmp_path):
    other = make_stream(tmp_path / "S", num_megabatches=1, num_train=40, shape=(1, 4, 4))
    words = ["--", "--width", "6", "--max-epoch", "1", "--cpu"]
    assert stream_command(["--stream", str(other), "--run", str(tmp_path / "R"), *words]) == 0
    stranger = str(tmp_path / "R/stage-000/member-0/checkpoint_last.pt")
    with pytest.raises(AlmaError, match=r"images of 16 pixels in all channels, .* has images of 64 pixels"):
        ensemble([members_of(run, 1)[0], stranger, "--out", str(tmp_path / "E.pt")])
    assert not (tmp_path / "E.pt").exists()
