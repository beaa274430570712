import itertools

from fairseq_alma.report import write_report
from tests.report.fakes import write_run


def test_a_new_stage_and_a_new_run_are_noticed_and_nothing_else(tmp_path, monkeypatch):
    first = write_run(tmp_path / "A", num_stages=1)
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 2:
            write_run(tmp_path / "B", num_stages=0)
        if len(slept) == 5:
            (first / "stage-001").mkdir()
            (first / "stage-001" / "stage.json").write_text("{}")

    monkeypatch.setattr(write_report.time, "sleep", sleep)
    noticed = [len(slept) for _ in itertools.islice(write_report.changes([first, tmp_path / "B"]), 3)]
    assert noticed == [0, 2, 5]
