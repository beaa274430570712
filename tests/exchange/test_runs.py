"""Commands that take a run, or a folder with one in it, from any folder, wherever both have been moved to."""

import shutil

import pytest

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint, write_checkpoint
from fairseq_alma.cli.export import main as export
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from tests.report.fakes import text_stream, write_run


@pytest.fixture
def model(tmp_path, stream, checkpoints, monkeypatch):
    """A folder with a stream and a run of two stages, begun in the folder above; the commands are given elsewhere."""
    root = tmp_path / "began" / "M"
    shutil.copytree(stream, root / "stream")
    said = {"path": "M/stream", "fingerprint": Stream.open(stream).fingerprint}
    write_run(root / "run", [30.0, 20.0], stream={**text_stream(num_megabatches=2), **said})
    for stage, kind in enumerate(("dense", "mixture")):
        checkpoint = read_checkpoint(checkpoints[kind], mmap=False)
        checkpoint["cfg"]["task"] = {"_name": "alma_lm", "data": "M/stream"}
        write_checkpoint(checkpoint, root / f"run/stage-{stage:03d}/member-0/checkpoint_last.pt")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return root


@pytest.mark.parametrize(
    ("given", "options", "stage"), [("link", [], 1), ("run", ["--arrival", "0"], 0), ("", ["--arrival", "1"], 1)]
)
def test_the_model_of_an_arrival_is_exported_with_its_figures(given, options, stage, model, tmp_path):
    (model / "link").symlink_to("run/stage-001/member-0/checkpoint_last.pt")
    assert export([str(model / given), "--out", "out", *options]) == 0
    kind = ("qwen3", "qwen3_moe")[stage]
    assert f'"model_type": "{kind}"' in (tmp_path / "elsewhere/out/config.json").read_text()
    card = (tmp_path / "elsewhere/out/README.md").read_text()
    assert f"| test perplexity | {(30, 20)[stage]}.00 per token" in card
    assert Stream.open(model / "stream").fingerprint[:16] in card


def test_a_checkpoint_of_a_run_that_is_not_what_was_tested_has_no_figures(model, tmp_path):
    other = model / "run/stage-001/member-0/checkpoint_average.pt"
    shutil.copy(model / "run/stage-001/member-0/checkpoint_last.pt", other)
    assert export([str(other), "--out", "out"]) == 0
    card = (tmp_path / "elsewhere/out/README.md").read_text()
    assert "another checkpoint of the stage was tested" in card and "test perplexity" not in card
    assert "| learner | sm, waiting time 1, seed" in card and "| 2 of 2 (stage 1)" in card
    path = model / "run/run.json"  # two members that begin with random weights
    path.write_text(path.read_text().replace("previous", "scratch").replace('"num_members": null', '"num_members": 2'))
    assert export([str(other), "--out", "new"]) == 0
    card = (tmp_path / "elsewhere/new/README.md").read_text()
    assert "updates on 500 tokens" in card and "| 1 of 2 (stage 1)" in card


def test_a_run_finds_its_stream_where_both_were_moved_to_and_takes_no_other(model, tmp_path, sentencepiece_stream):
    shutil.copytree(sentencepiece_stream, "M/stream")  # where the run's record points from here
    moved = tmp_path / "moved"
    model.rename(moved)
    assert export([str(moved), "--out", "out"]) == 0
    shutil.rmtree(moved / "stream")
    with pytest.raises(AlmaError, match="found another tokenizer"):
        export([str(moved), "--out", "other"])
    shutil.rmtree("M")
    with pytest.raises(AlmaError, match=r"training stream M/stream not found; give --stream STREAM"):
        export([str(moved), "--out", "other"])


def test_a_path_without_a_model_is_one_line(model, tmp_path):
    checkpoint = model / "run/stage-001/member-0/checkpoint_last.pt"
    for path, options, message in (
        (model, ["--arrival", "7"], "no model at arrival 7; give an arrival from 0 to 1"),
        (checkpoint, ["--arrival", "0"], "expected a run, found .*checkpoint_last.pt"),
        (model / "runs", ["--arrival", "0"], "MODEL .*runs: expected a file, found nothing; give a run"),
        (model / "stream", [], "expected a file, found a folder; give a run, or a checkpoint"),
    ):
        with pytest.raises(AlmaError, match=message):
            export([str(path), "--out", "out", *options])
    model.joinpath("run").rename(tmp_path / "seed-1")
    with pytest.raises(AlmaError, match=r"expected a run, found a folder of runs; give one run, such as .*seed-1"):
        export([str(tmp_path), "--out", "out"])
