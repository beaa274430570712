import json
import os
import time

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.files import write_json_atomically
from fairseq_alma.learners.learner import ModelId
from fairseq_alma.runs import run_folder
from fairseq_alma.runs.run_folder import RunFolder, StageClock
from tests.runs.runs import RUN


def test_a_directory_with_other_files_does_not_become_a_run(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(AlmaError, match=r"found other files \(no run.json\)"), RunFolder(tmp_path).lock_run():
        pass
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_run_of_version_0_2_0_and_one_of_a_later_version_are_refused_in_one_line(tmp_path):
    folder, path = RunFolder(tmp_path), tmp_path / "run.json"
    folder.write_run(RUN)
    assert json.loads(path.read_text()) == {"format_version": 2, **RUN}
    assert folder.read_run() == RUN
    for record, read in (("run.json", folder.read_run), ("stage-000/stage.json", lambda: folder.read_stage(0))):
        (tmp_path / record).parent.mkdir(exist_ok=True)
        for version, found in ((1, "1 of fairseq_alma 0.2.0 or older"), (3, "3; ")):
            (tmp_path / record).write_text(json.dumps({"format_version": version}))
            with pytest.raises(AlmaError, match=f"{record}: expected format version 2, found {found}"):
                read()
    with folder.lock_stage(0):  # complete: with a lock for each stage, a run of 1,100 stages could not be extended
        folder.write_run(RUN)


def test_wall_time_adds_up_over_launches_without_the_pauses(tmp_path):
    now = time.time()
    log = tmp_path / "train.log"
    log.write_text("x")
    write_json_atomically(tmp_path / "clock.json", {"spent": 100.0, "started": now - 5000})
    for path in (log, tmp_path / "clock.json"):
        os.utime(path, (now - 4000, now - 4000))  # killed 1000 s after its start
    (tmp_path / ".lock").write_text("signed by this launch, before it asks")
    assert StageClock(tmp_path / "clock.json", tmp_path).seconds() == pytest.approx(1100, abs=100)


@pytest.mark.parametrize("change", [-3600, 3600])
def test_wall_time_does_not_depend_on_the_system_time(change, tmp_path, monkeypatch):
    monotonic, began = [50.0], time.time()
    monkeypatch.setattr(run_folder.time, "monotonic", lambda: monotonic[0])
    ours = StageClock(tmp_path / "clock.json", tmp_path)
    monotonic[0] += 70
    monkeypatch.setattr(run_folder.time, "time", lambda: began + 70 + change)
    assert ours.seconds() == 70


@pytest.mark.parametrize("content", ["", "{", "[]", '{"spent": -1}', '{"spent": "many", "started": null}'])
def test_a_damaged_clock_counts_from_zero(content, tmp_path):
    (tmp_path / "clock.json").write_text(content)
    StageClock(tmp_path / "clock.json", tmp_path).stop()
    assert json.loads((tmp_path / "clock.json").read_text())["spent"] < 600


LEFT = [
    ".clock.json.0123456789abcdef.tmp", "member-0/.training.pt.0123456789abcdef.tmp",
    "member-0/checkpoint_1_5.pt.tmp", "member-0/checkpoint_last.pt.tmp",
]  # fmt: skip


def test_locking_a_stage_removes_temporary_files_of_killed_processes_only(tmp_path):
    stage = RunFolder(tmp_path).stage_folder(0)
    others = ["notes.tmp", "member-0/checkpoint_1_5.pt", "member-0.bak/checkpoint_1.pt.tmp"]
    for name in (*LEFT, *others):
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        (stage / name).write_text("x")
    with RunFolder(tmp_path).lock_stage(0):
        found = {str(path.relative_to(stage)) for path in stage.rglob("*") if path.is_file() and path.name != ".lock"}
    assert found == {*others}


def test_a_stage_that_fails_leaves_no_partial_file_in_folders_that_it_made(tmp_path):
    partial = RunFolder(tmp_path).checkpoint(ModelId(0, 0)).with_suffix(".pt.tmp")
    with pytest.raises(OSError, match="full"), RunFolder(tmp_path).lock_stage(0):
        partial.parent.mkdir(parents=True)
        partial.touch()
        raise OSError("the disk is full")
    assert not partial.exists()


def test_a_run_may_be_a_symbolic_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "R").symlink_to(tmp_path / "elsewhere")
    with RunFolder(tmp_path / "R").lock_stage(0):
        assert (tmp_path / "elsewhere" / "stage-000" / ".lock").exists()
