"""Slices of mega-batches that a model is tested on: held out of them, and trained on."""

import json
import math

import pytest

from data_prep.text.command import main as prepare
from fairseq_alma.cli.stream import main
from tests.kills.learners import UPDATES
from tests.text.stock_commands import write_text


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slices")
    write_text(folder / "text.txt", num_documents=120)
    sizes = ["--vocab-size", "256", "--valid-bytes", "600", "--test-bytes", "600", "--holdout-bytes", "1200"]
    prepare([str(folder / "text.txt"), "--out", str(folder / "S"), "--megabatches", "2", *sizes, "--workers", "1"])
    return folder / "S"


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
