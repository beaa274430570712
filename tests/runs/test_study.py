from types import SimpleNamespace

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.runs.study import describe_run, require_same_run
from tests.runs.fakes import write_manifest

OPTIONS = {"wait": 1, "replay": False, "keep_checkpoints": False}
TRAIN = {"--lr": "0.1", "--cpu": ""}


def describe(stream, learner="sm", seed=1, options=OPTIONS, train=TRAIN):
    return describe_run(learner, seed, options, train, stream)


def test_run_json_describes_the_stream_and_versions(tmp_path):
    record = describe(write_manifest(tmp_path, 4))
    assert record["stream"]["num_megabatches"] == 4
    assert record["stream"]["vocab_size"] == 50
    assert record["stream"]["decontaminated"] is None
    assert record["stream"]["test"] == {"num_tokens": 100, "num_bytes": 400, "num_images": 0}
    assert set(record["versions"]) == {"python", "torch", "fairseq", "fairseq_alma"}
    assert all(record["versions"].values())


@pytest.mark.parametrize(
    "change,message",
    [
        ({"seed": 2}, r"--seed changed from 1 to 2"),
        ({"options": {**OPTIONS, "wait": 3}}, r"--wait changed from 1 to 3"),
        ({"train": {**TRAIN, "--lr": "0.2"}}, r"--lr changed from 0.1 to 0.2"),
        ({"train": {**TRAIN, "--bf16": ""}}, r"--bf16 changed from not given to given"),
    ],
)
def test_other_options_are_refused_and_named(tmp_path, change, message):
    stream = write_manifest(tmp_path, 4)
    with pytest.raises(AlmaError, match=message):
        require_same_run("run.json", describe(stream), describe(stream, **change), stream)


def test_options_that_change_no_result_may_change(tmp_path):
    stream = write_manifest(tmp_path, 4)
    shown = {"--tensorboard-logdir": "tb", "--wandb-project": "p", "--log-interval": "5"}
    batches = {"--batch-size": "4", "--update-freq": "2", "--checkpoint-activations": ""}
    now = describe(stream, options={**OPTIONS, "keep_checkpoints": True}, train={**TRAIN, **shown, **batches})
    assert require_same_run("run.json", describe(stream), now, stream) == []
    images = SimpleNamespace(**{**vars(stream), "kind": "images"})  # an update is one batch
    with pytest.raises(AlmaError, match="--batch-size changed from not given to 4"):
        require_same_run("run.json", describe(stream), now, images)


def test_a_run_resumes_on_a_moved_or_longer_stream_only(tmp_path):
    first = write_manifest(tmp_path / "a", 3, 1)
    for length in (3, 4):
        now = write_manifest(tmp_path / f"longer-{length}", length, 1)
        assert require_same_run("run.json", describe(first), describe(now), now) == []
    for length, seed in ((2, 1), (3, 2)):
        now = write_manifest(tmp_path / f"other-{length}", length, seed)
        with pytest.raises(AlmaError, match="expected the stream of the run"):
            require_same_run("run.json", describe(first), describe(now), now)


def test_a_growth_schedule_may_be_extended(tmp_path):
    stream = write_manifest(tmp_path, 3)
    schedules = ("layers=1,6 experts=2,3", "layers=1,6,6 experts=2,3,3", "layers=1,2,2 experts=2,3,3", "layers=1,6,6")
    options = ({**OPTIONS, "grow_schedule": schedule} for schedule in schedules)
    before, longer, *others = (describe(stream, "grow", options=each) for each in options)
    assert require_same_run("run.json", before, longer, stream) == []
    for now in others:
        with pytest.raises(AlmaError, match="--grow-schedule changed from layers=1,6 experts=2,3 to layers="):
            require_same_run("run.json", before, now, stream)


def test_other_versions_are_reported(tmp_path):
    stream = write_manifest(tmp_path, 4)
    before = describe(stream)
    before["versions"] = {**before["versions"], "torch": "1.0"}
    (note,) = require_same_run("run.json", before, describe(stream), stream)
    assert "torch 1.0" in note
