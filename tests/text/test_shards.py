"""A whole run on mega-batches of many files each, also one that is killed, is that on one file for each."""

import signal

import pytest
import torch

from data_prep.text.command import main as prepare_text
from fairseq_alma.data.stream import Stream
from tests.kills.crashes import Crash
from tests.kills.launch import launch
from tests.kills.learners import Learner, make_stream
from tests.runs.results import stage_records


@pytest.mark.slow
def test_a_run_on_shards_that_is_killed_and_resumed_is_the_run_on_one_file_for_each_set(tmp_path):
    streams = [make_stream("text", tmp_path), tmp_path / "shards"]
    sizes = ["--vocab-size", "256", "--valid-words", "100", "--test-words", "100", "--workers", "1"]
    prepare = [str(tmp_path / "text.txt"), "--out", str(streams[1]), "--megabatches", "2", *sizes]
    assert prepare_text([*prepare, "--shard-tokens", "300"]) in (None, 0)
    assert len(Stream.open(streams[1]).megabatch(0).files) > 4
    learner, log = Learner("text", "sm"), tmp_path / "log"

    def begin(name, stream, *crash):
        run = tmp_path / name
        return launch(learner.arguments(stream, run), log, Crash(run, tmp_path / "journal", *crash))

    assert begin("whole", streams[0]) == 0, log.read_text()
    second = r"/stage-001/member-0/checkpoint_\d+_4\.pt"
    assert begin("cut", streams[1], 1, "kill", second) == -signal.SIGKILL, log.read_text()
    assert not (tmp_path / "cut/stage-001/stage.json").exists()
    assert begin("cut", streams[1]) == 0, log.read_text()
    records = [[{**each, "wall_seconds": 0} for each in stage_records(tmp_path / name)] for name in ("whole", "cut")]
    assert len(records[0]) == 2 and records[0] == records[1]
    last = "stage-001/member-0/checkpoint_last.pt"
    one, other = (torch.load(tmp_path / name / last, weights_only=True)["model"] for name in ("whole", "cut"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
