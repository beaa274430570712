"""A run on raw text with the real commands, killed and resumed."""

import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from fairseq_alma.runs.run_folder import RunFolder
from tests.kills.crashes import Crash
from tests.kills.launch import launch
from tests.runs.results import stage_records
from tests.scripts import run_script
from tests.text.stock_commands import write_text

NUM_UPDATES = 30
TRAIN = [
    "--arch", "alma_switch_lm_tiny", "--decoder-layers", "2", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim",
    "32", "--decoder-attention-heads", "2", "--num-experts", "4", "--criterion", "alma_switch_cross_entropy", "--cpu",
    "--optimizer", "adam", "--lr", "0.01", "--lr-scheduler", "polynomial_decay", "--total-num-update", str(NUM_UPDATES),
    "--max-update", str(NUM_UPDATES), "--batch-size", "4", "--tokens-per-sample", "16", "--num-workers", "0",
]  # fmt: skip


def alma_stream(folder, *options):
    own = ["--stream", f"{folder}/S", "--run", f"{folder}/R", "--save-every", "6"]
    return ["alma-stream", *own, *options, "--", *TRAIN]


def load(folder):
    import torch

    return torch.load(folder / "checkpoint_last.pt", weights_only=True)


def stage_record(folder, stage):
    return stage_records(folder / "R")[stage]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a directory with a stream S, a run R whose second stage was killed and resumed, and ``uninterrupted/``.

    ``uninterrupted/`` is the same stage, trained by the printed command without a kill.
    """
    folder = tmp_path_factory.mktemp("stream")
    write_text(folder / "text.txt", num_documents=60)
    prepare = ["alma-prep-text", f"{folder}/text.txt", "--out", f"{folder}/S", "--megabatches", "2"]
    prepare += ["--vocab-size", "300", "--valid-bytes", "1200", "--test-bytes", "1200", "--workers", "1"]
    run_script(prepare).check_returncode()
    subprocess.run(alma_stream(folder, "--stage", "0"), check=True, stderr=subprocess.PIPE)
    shutil.copytree(folder / "R" / "stage-000", folder / "before")
    trained = run_script(printed_training(folder))
    assert trained.returncode == 0, trained.stderr
    kill_in_training(folder)
    run(folder, alma_stream(folder)[1:])
    return folder


def run(folder, arguments):
    log = folder / "log"
    assert launch(arguments, log, Crash(Path(arguments[3]), folder / "journal")) == 0, log.read_text()


def printed_training(folder):
    """Return the printed training command of stage 1, with another save directory."""
    dry_run = run_script(alma_stream(folder, "--stage", "1", "--dry-run"))
    training = dry_run.stdout[: dry_run.stdout.index("\nfairseq-eval-lm")]
    training = training.replace(f"{folder}/R/stage-001/member-0", f"{folder}/uninterrupted")
    training = training.replace(f"{folder}/R/stage-000", f"{folder}/before")
    return shlex.split(training.replace("\\\n", " "), comments=True)


def kill_in_training(folder):
    """Check that a locked stage is refused; then kill alma-stream at the third checkpoint of stage 1."""
    stage = folder / "R" / "stage-001"
    with RunFolder(folder / "R").lock_stage(1), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fairseq_alma.files.LOCK_PATIENCE_SECONDS", 0)
        second = run_script(alma_stream(folder))
    assert second.returncode == 1
    assert "stage-001: another alma-stream" in second.stderr
    crash = Crash(folder / "R", folder / "journal", 1, only=r"/stage-001/member-0/checkpoint_\d+_18\.pt")
    assert launch(alma_stream(folder)[1:], folder / "killed.log", crash) == -signal.SIGKILL
    assert list(stage.glob("member-0/checkpoint_1_*.pt"))
    assert not (stage / "stage.json").exists()


def test_stages_train_in_order_and_perplexity_falls(folder):
    first, second = stage_record(folder, 0), stage_record(folder, 1)
    assert [first["megabatches"], second["megabatches"]] == [[0], [1]]
    assert second["test"]["ppl"] < first["test"]["ppl"] < 300
    assert first["num_updates"] == second["num_updates"] == NUM_UPDATES
    assert first["num_experts"] == 4
    assert first["train_flops"] > 3 * first["train_tokens"] * first["num_params"] / 4


def test_only_the_last_weights_are_kept_without_optimizer_state(folder):
    assert [path.name for path in folder.glob("R/**/*.pt")] == ["checkpoint_last.pt"]
    state = load(folder / "R" / "stage-001" / "member-0")
    assert {"cfg", "model", "optimizer_history"} <= set(state)
    assert "last_optimizer_state" not in state


def test_a_stage_killed_in_training_ends_with_the_same_weights_bit_for_bit(folder):
    import torch

    expected, found = load(folder / "uninterrupted"), load(folder / "R" / "stage-001" / "member-0")
    assert (folder / "R" / "stage-001" / "train-member-0.log").read_text().count("$ fairseq-train") == 2
    assert expected["model"].keys() == found["model"].keys()
    assert all(torch.equal(expected["model"][name], found["model"][name]) for name in expected["model"])
    counted = expected["extra_state"]["AlmaLMTask"]["train_tokens"]
    assert stage_record(folder, 1)["train_tokens"] == counted
    assert (NUM_UPDATES - 10) * 4 * 16 < counted <= NUM_UPDATES * 4 * 16


def test_the_report_shows_the_run(folder):
    done = run_script(["alma-report", f"{folder}/R", "--out", f"{folder}/report"])
    ppl = [stage_record(folder, stage)["test"]["ppl"] for stage in (0, 1)]
    assert f"{ppl[0]:.2f} | {ppl[1]:.2f}" in done.stdout
    assert (folder / "report" / "perplexity.csv").read_text().count("\n") == 2


def run_learner(folder, learner, *options):
    few = list(TRAIN)
    for flag in {"gmoe": ["--num-experts"], "grow": ["--num-experts", "--decoder-layers"]}.get(learner, ()):
        del few[few.index(flag) : few.index(flag) + 2]
    own = ["--stream", f"{folder}/S", "--run", f"{folder}/{learner}", "--learner", learner]
    run(folder, [*own, *options, "--", *few, "--max-update", "5"])


def test_an_ensemble_is_one_checkpoint_that_works_after_the_run(folder):
    run_learner(folder, "ens", "--iid", "2")
    record = stage_records(folder / "ens")[0]
    assert (record["num_members"], record["num_experts"], record["megabatches"]) == (2, 4, [0, 1])
    assert record["num_updates"] == 10  # 5 for each of two mega-batches
    left = sorted(str(path.relative_to(folder / "ens")) for path in folder.glob("ens/**/*.pt"))
    members = [f"stage-000/member-{member}/checkpoint_last.pt" for member in (0, 1)]
    assert left == ["stage-000/ensemble.pt", *members]
    evaluate = ["fairseq-eval-lm", f"{folder}/S", "--user-dir", "fairseq_alma", "--task", "alma_lm", "--cpu"]
    evaluate += ["--path", f"{folder}/ens/stage-000/ensemble.pt", "--gen-subset", "test", "--tokens-per-sample", "16"]
    done = run_script(evaluate)
    loss = float(re.search(r"Loss \(base 2\): (\S+),", done.stdout + done.stderr)[1])
    assert loss == pytest.approx(record["test"]["loss"], abs=2e-4)


@pytest.mark.parametrize(
    "learner",
    [
        pytest.param(["gmoe", "--grow-schedule", "2,4", "--grow-method", "split"], marks=pytest.mark.slow),
        ["grow", "--grow-schedule", "experts=2,4 layers=2,4"],
    ],
)
def test_growth_by_splits_and_layers_keeps_the_loss(folder, learner):
    run_learner(folder, *learner)
    first, second = stage_records(folder / learner[0])
    assert (first["num_experts"], second["num_experts"]) == (2, 4)
    assert second["num_params"] > first["num_params"]
    assert second["after_growth"]["valid"]["loss"] == pytest.approx(first["valid"]["loss"], abs=2e-4)
    assert second["valid"]["loss"] != second["after_growth"]["valid"]["loss"]
    assert "after_growth" not in first
    left = [str(path.relative_to(folder / learner[0])) for path in folder.glob(f"{learner[0]}/**/*.pt")]
    assert left == ["stage-001/member-0/checkpoint_last.pt"]
