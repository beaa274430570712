"""A feature in a file outside the package: its option, a run, and a kill during the run."""

import json
from pathlib import Path

import pytest
import torch

from tests.kills.crashes import Crash
from tests.kills.launch import launch
from tests.scripts import run_script

OWN = Path(__file__).with_name("clipping.py")
LIMIT = 0.05
TEXT = [
    "--arch", "alma_switch_lm_tiny", "--decoder-layers", "2", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim",
    "32", "--decoder-attention-heads", "2", "--num-experts", "4", "--criterion", "alma_switch_cross_entropy", "--cpu",
    "--optimizer", "adam", "--lr", "0.01", "--max-update", "12", "--batch-size", "4", "--tokens-per-sample", "32",
    "--num-workers", "0",
]  # fmt: skip
KILL = """
import os, signal
after_step = ClippedWeights.after_step
def kill_after_nine(self, model, update):
    after_step(self, model, update)
    if self.num_updates == 9:
        os.kill(os.getpid(), signal.SIGKILL)
ClippedWeights.after_step = kill_after_nine
"""


def alma_stream(stream, run, feature, *options, words=()):
    own = ["--features-from", str(feature), "--clip-weights", str(LIMIT), "--stage", "0", *options]
    arguments = ["--stream", str(stream), "--run", str(run), *own, "--", *words]
    return launch(arguments, run.with_suffix(".log"), Crash(run, run.with_suffix(".journal")))


def test_the_help_lists_the_option_of_the_feature():
    shown = run_script(["alma-stream", "--features-from", str(OWN), "--help"]).stdout
    assert "anytime training" in shown and "largest absolute value of a weight" in shown


def test_a_missing_file_is_a_usage_error():
    done = run_script(["alma-stream", "--features-from", "nowhere.py", "--help"])
    assert done.returncode == 2 and "--features-from nowhere.py: no such file or folder" in done.stderr


@pytest.mark.slow
def test_a_killed_training_with_the_feature_resumes_bit_for_bit(trained, tmp_path):
    killing = tmp_path / "clipping.py"
    killing.write_text(OWN.read_text() + KILL)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert alma_stream(trained.stream, whole, OWN, "--save-every", "6", words=TEXT) == 0
    assert alma_stream(trained.stream, cut, killing, "--save-every", "6", words=TEXT) == 1
    assert alma_stream(trained.stream, cut, OWN, "--save-every", "6", words=TEXT) == 0
    assert json.loads((cut / "run.json").read_text())["options"]["clip_weights"] == LIMIT
    one, other = (torch.load(each / "stage-000/member-0/checkpoint_last.pt") for each in (whole, cut))
    assert one["extra_state"]["AlmaLMTask"] == other["extra_state"]["AlmaLMTask"]
    assert one["extra_state"]["AlmaLMTask"]["clipped_updates"] == 12
    for name, tensor in one["model"].items():
        assert torch.equal(tensor, other["model"][name]), name
        assert tensor.abs().max() <= LIMIT or "positions" in name
    assert max(float(tensor.abs().max()) for tensor in one["model"].values()) == pytest.approx(LIMIT)
