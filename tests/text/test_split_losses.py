"""Slices of mega-batches that a model is tested on: held out of them, and trained on."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from data_prep.text.command import main as prepare
from fairseq_alma.cli.stream import main
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.text.split_losses import KeptPredictions
from tests.kills.learners import UPDATES
from tests.text.stock_commands import write_text
from tests.text.test_task import task_of


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slices")
    write_text(folder / "text.txt", num_documents=120)
    sizes = ["--vocab-size", "256", "--valid-bytes", "600", "--test-bytes", "600", "--holdout-bytes", "1200"]
    prepare([str(folder / "text.txt"), "--out", str(folder / "S"), "--megabatches", "2", *sizes, "--workers", "1"])
    return folder / "S"


def test_a_training_slice_is_as_large_as_the_held_out_one_and_from_all_over_the_mega_batch(stream):
    task = task_of(SimpleNamespace(stream=stream), "--megabatch", "1")
    for split in ("train", "megabatch-001/slice", "megabatch-001/holdout"):
        task.load_dataset(split)
    whole, chosen = task.dataset("train"), task.dataset("megabatch-001/slice")
    held_out = Stream.open(stream).holdout(1).num_tokens
    assert held_out <= chosen.sizes.sum() <= held_out + 2 * whole.sizes.max()
    assert task.dataset("megabatch-001/holdout").sizes.sum() == held_out
    steps = np.diff(chosen.indices)
    assert steps.min() >= len(whole) // len(chosen) and steps.max() <= len(whole) // len(chosen) + 1
    assert chosen[1]["target"].tolist() == whole[int(chosen.indices[1])]["target"].tolist()


def test_without_a_held_out_slice_there_is_no_training_slice_either(trained):
    task = task_of(trained, "--megabatch", "1")
    with pytest.raises(AlmaError, match="nothing is held out of its mega-batches"):
        task.load_dataset("megabatch-001/slice")


def test_a_run_tests_slices_of_all_mega_batches_after_each_stage(stream, tmp_path):
    words = ["--stream", str(stream), "--run", str(tmp_path / "R"), "--matrix", "--stage", "0", "--", *UPDATES]
    assert main([*words, "--num-experts", "2"]) == 0
    matrix = json.loads((tmp_path / "R/stage-000/stage.json").read_text())["matrix"]
    assert [len(matrix[name]) for name in ("held_out", "training")] == [2, 2]
    assert all(1 < loss < math.log2(300) for losses in matrix.values() for loss in losses)
    assert len({*matrix["held_out"], *matrix["training"]}) == 4


def test_a_stream_of_which_nothing_is_held_out_is_refused(trained, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--stream", str(trained.stream), "--run", str(tmp_path / "R"), "--matrix", "--", *UPDATES])
    assert f"{trained.stream}: nothing is held out of its mega-batches; prepare" in capsys.readouterr().err
    assert not (tmp_path / "R").exists()


def kept(members, **log_probs):
    sums = KeptPredictions("text", tuple(members))
    for split, each in log_probs.items():
        for member in each:
            sums.add(split, np.array(member, dtype=np.float32))
    return sums


def test_the_loss_is_that_of_the_mean_probability_in_bits():
    sums = kept("ab", test=[np.log([0.5, 0.25]), np.log([0.25, 0.75])])
    assert sums.loss("test") == pytest.approx(-(np.log2(0.375) + np.log2(0.5)) / 2, rel=1e-6)
    assert kept("ab", test=[[-np.inf, np.log(0.5)], [-np.inf, np.log(0.5)]]).loss("test") == pytest.approx(
        1
    )  # as fairseq


def test_a_file_gives_back_the_same_bits_and_a_further_member_is_added_to_them(tmp_path):
    draw = np.random.default_rng(0)
    members = -draw.random((3, 7)).astype(np.float32)
    kept("ab", valid=members[:2, :3], test=members[:2]).write(tmp_path / "kept.npz")
    read = KeptPredictions.read(tmp_path / "kept.npz")
    now = KeptPredictions("text", ("a", "b", "c"))
    assert now.is_begun_by(read)
    now.log_sums = dict(read.log_sums)
    now.add("test", members[2])
    assert now.loss("test") == kept("abc", test=members).loss("test")
    assert [len(each) for each in read.log_sums.values()] == [3, 7]


def test_sums_of_other_members_or_of_other_text_are_not_gone_on_with(tmp_path):
    now = KeptPredictions("text", ("a", "b"))
    assert not now.is_begun_by(None) and not now.is_begun_by(KeptPredictions("text", ("b",)))
    assert not now.is_begun_by(KeptPredictions("other text", ("a",)))
    assert KeptPredictions.read(tmp_path / "none.npz") is None
    kept("a", test=[[0.0]]).write(tmp_path / "cut.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:-30])
    assert KeptPredictions.read(tmp_path / "cut.npz") is None
