"""``alma-stream --seed 1 2`` on text: runs side by side, each with the files and figures of a run alone."""

import re

import pytest

from tests.kills.learners import write_text
from tests.runs.results import stage_records
from tests.scripts import run_script

pytest.importorskip("fairseq")
TRAIN = [
    "--arch", "alma_switch_lm_tiny", "--decoder-layers", "2", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim",
    "32", "--decoder-attention-heads", "2", "--criterion", "alma_switch_cross_entropy", "--cpu", "--optimizer", "adam",
    "--dropout", "0", "--lr", "0.01", "--max-update", "12", "--batch-size", "4", "--tokens-per-sample", "16",
    "--num-workers", "0",
]  # fmt: skip
GROWING = ["--learner", "gmoe", "--grow-schedule", "2,3", "--grow-method", "split", "--carry-optimizer"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeds")
    write_text(folder / "text.txt", num_words=40)
    prepare = ["alma-prep-text", f"{folder}/text.txt", "--out", f"{folder}/S", "--megabatches", "2"]
    prepare += ["--vocab-size", "300", "--valid-words", "200", "--test-words", "200", "--workers", "1"]
    run_script(prepare).check_returncode()
    return folder


def command(folder, run, *options):
    own = ["--stream", f"{folder}/S", "--run", f"{folder}/{run}", "--save-every", "3", "--keep-checkpoints"]
    return ["alma-stream", *own, *options, "--", *TRAIN]


@pytest.mark.slow
def test_runs_of_several_seeds_are_each_a_run_alone(folder, monkeypatch):
    monkeypatch.setattr("fairseq_alma.terminal.LOG_EVERY_SECONDS", 0.0)  # of the command too, which is forked
    several = [*GROWING, "--ema-half-life", "1/16", "--seed", "1", "2"]
    whole = run_script(command(folder, "whole", *several))
    whole.check_returncode()
    shown = [int(each) for each in re.findall(r"(\d+)/12 updates", whole.stderr)]
    assert shown and max(shown) <= 12  # of each stage, though the optimizer counts those of both
    alone = run_script(command(folder, "alone", *several[:-2], "1"))
    alone.check_returncode()
    records = [stage_records(each) for each in (folder / "alone", folder / "whole" / "seed-1")]
    for mine, beside in zip(*records, strict=True):
        assert beside["test"]["loss"] == pytest.approx(mine["test"]["loss"], abs=2e-3)
        assert {**beside, "test": 0, "valid": 0}.keys() == {**mine, "test": 0, "valid": 0}.keys()
        assert beside["train_tokens"] == mine["train_tokens"]
    assert "side by side" in (folder / "whole" / "seed-2" / "stage-001" / "train-member-0.log").read_text()


@pytest.mark.parametrize("alone", [(), ("--validate",)], ids=["side by side", "one after the other"])
def test_members_side_by_side_are_shown_as_one_training(folder, monkeypatch, alone):
    monkeypatch.setattr("fairseq_alma.terminal.LOG_EVERY_SECONDS", 0.0)
    ens = ["--learner", "ens", "--num-members", "2", "--stage", "0", *alone]
    ran = run_script(command(folder, f"ens{len(alone)}", *ens))
    ran.check_returncode()
    assert "0/12 updates" in ran.stderr
    assert ("member 0: 0/12 updates" in ran.stderr) == bool(alone)  # else the forecast would count only that one


def test_the_commands_of_each_seed_alone_are_printed(folder):
    dry_run = run_script(command(folder, "R", "--seed", "1", "2", "--dry-run"))
    assert dry_run.stdout.count("fairseq-train") == 4
    assert f"{folder}/R/seed-2/stage-001/member-0" in dry_run.stdout
