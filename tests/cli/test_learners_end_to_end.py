"""An ensemble, a growing mixture and a learner from outside through a real stream, by the code of the real commands."""

import json
import random
import re
from pathlib import Path

import pytest

from tests.kills.crashes import Crash
from tests.kills.launch import launch
from tests.scripts import run_script

pytest.importorskip("fairseq")

TRAIN = [
    "--arch", "alma_switch_lm_tiny", "--decoder-layers", "2", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim",
    "32", "--decoder-attention-heads", "2", "--criterion", "alma_switch_cross_entropy", "--cpu", "--optimizer", "adam",
    "--lr", "0.01", "--max-update", "5", "--batch-size", "4", "--tokens-per-sample", "16", "--num-workers", "0",
]  # fmt: skip
OUTSIDE = str(Path(__file__).parents[1] / "learners" / "resetting_learner.py")
LEARNERS = {
    "ens": (["--iid", "2"], ["--num-experts", "3"]),
    "gmoe": (["--grow-schedule", "2,4", "--grow-method", "split"], []),
    "reset": (["--learners-from", OUTSIDE, "--reset-every", "1"], ["--num-experts", "2"]),
}


def write_text(path):
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(60)]
    path.write_text("\n\n".join(" ".join(draw.choices(words, k=40)) for _ in range(60)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A stream S of two mega-batches, and a run for each learner."""
    folder = tmp_path_factory.mktemp("learners")
    write_text(folder / "text.txt")
    prepare = ["alma-prep-text", f"{folder}/text.txt", "--out", f"{folder}/S", "--megabatches", "2"]
    prepare += ["--vocab-size", "300", "--valid-words", "200", "--test-words", "200", "--workers", "1"]
    run_script(prepare).check_returncode()
    for learner in ("ens", "gmoe"):
        run_learner(folder, learner)
    return folder


def run_learner(folder, learner):
    options, model = LEARNERS[learner]
    command = ["--stream", f"{folder}/S", "--run", f"{folder}/{learner}", "--learner", learner]
    log = folder / f"{learner}.log"
    status = launch([*command, *options, "--", *TRAIN, *model], log, Crash(folder / learner, folder / "journal"))
    assert status == 0, log.read_text()


@pytest.mark.slow
def test_a_learner_from_outside_the_package_goes_through_a_stream_of_text(folder):
    run_learner(folder, "reset")
    assert [stage_record(folder, "reset", stage)["megabatches"] for stage in range(2)] == [[0], [1]]
    log = (folder / "reset" / "stage-001" / "train-member-0.log").read_text()
    assert "--finetune-from-model" not in log


def stage_record(folder, learner, stage):
    return json.loads((folder / learner / f"stage-00{stage}" / "stage.json").read_text())


def test_an_ensemble_is_one_checkpoint_that_still_works_when_all_is_tidied_up(folder):
    record = stage_record(folder, "ens", 0)
    assert (record["num_members"], record["num_experts"], record["megabatches"]) == (2, 3, [0, 1])
    assert record["num_updates"] == 10  # 5 for each of two mega-batches
    left = sorted(str(path.relative_to(folder / "ens")) for path in folder.glob("ens/**/*.pt"))
    assert left == [
        "stage-000/ensemble.pt", "stage-000/member-0/checkpoint_last.pt", "stage-000/member-1/checkpoint_last.pt"
    ]  # fmt: skip
    evaluate = ["fairseq-eval-lm", f"{folder}/S", "--user-dir", "fairseq_alma", "--task", "alma_lm", "--cpu"]
    evaluate += ["--path", f"{folder}/ens/stage-000/ensemble.pt", "--gen-subset", "test", "--tokens-per-sample", "16"]
    done = run_script(evaluate)
    loss = float(re.search(r"Loss \(base 2\): (\S+),", done.stdout + done.stderr)[1])
    assert loss == pytest.approx(record["test"]["loss"], abs=2e-4)


def test_a_mixture_that_grows_by_splits_goes_on_without_a_jump(folder):
    first, second = stage_record(folder, "gmoe", 0), stage_record(folder, "gmoe", 1)
    assert (first["num_experts"], second["num_experts"]) == (2, 4)
    assert second["num_params"] > first["num_params"]
    assert second["after_growth"]["valid"]["loss"] == pytest.approx(first["valid"]["loss"], abs=2e-4)
    assert second["valid"]["loss"] != second["after_growth"]["valid"]["loss"]
    assert "after_growth" not in first
    left = [str(path.relative_to(folder / "gmoe")) for path in folder.glob("gmoe/**/*.pt")]
    assert left == ["stage-001/member-0/checkpoint_last.pt"]
