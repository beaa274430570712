"""A stream from raw text to the table, with the real commands: also killed in the middle, which must change nothing."""

import json
import os
import random
import shutil
import signal
import subprocess
import time

import pytest

pytest.importorskip("fairseq")

WORDS = ["".join(random.Random(i).choices("abcdefgh", k=4)) for i in range(60)]
TRAIN = [
    "--arch", "alma_switch_lm_tiny", "--decoder-layers", "2", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim",
    "32", "--decoder-attention-heads", "2", "--num-experts", "4", "--criterion", "alma_switch_cross_entropy", "--cpu",
    "--optimizer", "adam", "--lr", "0.01", "--lr-scheduler", "polynomial_decay", "--total-num-update", "40",
    "--max-update", "40", "--batch-size", "4", "--tokens-per-sample", "16", "--num-workers", "0",
]  # fmt: skip


def write_text(path):
    """Write documents in which each word all but decides the next, so that there is something to learn."""
    draw = random.Random(0)
    documents = []
    for _ in range(60):
        at, words = draw.randrange(60), []
        for _ in range(40):
            at = (at * 7 + draw.randrange(3)) % 60
            words.append(WORDS[at])
        documents.append(" ".join(words))
    path.write_text("\n\n".join(documents))


def alma_stream(folder, run, *options):
    return [
        "alma-stream",
        "--stream",
        f"{folder}/S",
        "--run",
        f"{folder}/{run}",
        "--save-every",
        "6",
        *options,
        "--",
        *TRAIN,
    ]


def figures(path):
    record = json.loads(path.read_text())
    del record["wall_seconds"]
    return record


def weights(folder):
    import torch

    return torch.load(folder / "member-0" / "checkpoint_last.pt", weights_only=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A stream S of two mega-batches; run A has both stages, run B the first one."""
    folder = tmp_path_factory.mktemp("stream")
    write_text(folder / "text.txt")
    prepare = ["alma-prep-text", f"{folder}/text.txt", "--out", f"{folder}/S", "--megabatches", "2"]
    prepare += ["--vocab-size", "300", "--valid-words", "200", "--test-words", "200", "--workers", "1"]
    subprocess.run(prepare, check=True, stderr=subprocess.PIPE)
    subprocess.run(alma_stream(folder, "A", "--stage", "0"), check=True, stderr=subprocess.PIPE)
    shutil.copytree(folder / "A", folder / "B")
    subprocess.run(alma_stream(folder, "A"), check=True, stderr=subprocess.PIPE)
    return folder


def test_a_stream_is_learned_stage_after_stage(folder):
    first, second = (figures(folder / "A" / f"stage-00{stage}" / "stage.json") for stage in (0, 1))
    assert [first["megabatches"], second["megabatches"]] == [[0], [1]]
    assert second["test"]["ppl"] < first["test"]["ppl"] < 300
    assert first["num_updates"] == second["num_updates"] == 40
    assert 0 < first["train_tokens"] <= 40 * 4 * 16
    assert first["num_experts"] == 4
    assert first["train_flops"] > 3 * first["train_tokens"] * first["num_params"]


def test_only_the_last_weights_are_left_without_their_optimizer_state(folder):
    assert [path.name for path in folder.glob("A/**/*.pt")] == ["checkpoint_last.pt"]
    state = weights(folder / "A" / "stage-001")
    assert {"cfg", "model", "optimizer_history"} <= set(state)
    assert "last_optimizer_state" not in state


def test_a_stage_killed_in_training_ends_with_the_same_figures_and_weights(folder):
    import torch

    process = subprocess.Popen(alma_stream(folder, "B"), stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    stage = folder / "B" / "stage-001"
    deadline = time.monotonic() + 120
    while not list(stage.glob("member-0/checkpoint_1_*.pt")) and time.monotonic() < deadline:
        time.sleep(0.005)
    second = subprocess.run(alma_stream(folder, "B"), capture_output=True, text=True)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (stage / "stage.json").exists()
    assert second.returncode == 1
    assert "stage-001: another alma-stream" in second.stderr
    subprocess.run(alma_stream(folder, "B"), check=True, stderr=subprocess.PIPE)
    assert figures(stage / "stage.json") == figures(folder / "A" / "stage-001" / "stage.json")
    expected, found = (weights(folder / run / "stage-001")["model"] for run in "AB")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_report_shows_the_run(folder):
    done = subprocess.run(
        ["alma-report", f"{folder}/A", "--out", f"{folder}/report"], check=True, capture_output=True, text=True
    )
    ppl = [figures(folder / "A" / f"stage-00{stage}" / "stage.json")["test"]["ppl"] for stage in (0, 1)]
    assert f"{ppl[0]:.2f} | {ppl[1]:.2f}" in done.stdout
    assert (folder / "report" / "perplexity.csv").read_text().count("\n") == 2
