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
from tests.kills.learners import UPDATES
from tests.text.stock_commands import write_text
from tests.text.test_task import task_of


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slices")
    write_text(folder / "text.txt", num_documents=120)
    sizes = ["--vocab-size", "256", "--valid-words", "100", "--test-words", "100", "--holdout-words", "200"]
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
