import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.runs import arrival_log
from fairseq_alma.runs.arrival_log import ArrivalLog, sinks_of
from fairseq_alma.runs.live_log import LiveLog
from fairseq_alma.runs.run_folder import RunFolder
from tests.runs.runs import RUN, complete, make_plans


class MemorySink:
    """Remembers how many points it was given each time; takes its time, and fails when told to."""

    def __init__(self, clock, seconds=0.0):
        self.clock, self.seconds = clock, seconds
        self.written = []
        self.error = None

    def require(self):
        if isinstance(self.error, AlmaError):
            raise self.error

    def write(self, points):
        self.clock[0] += self.seconds
        if self.error:
            raise self.error
        self.written.append(len(points))


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(arrival_log.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "R")
    run.write_run(RUN)
    return run


def test_what_was_complete_before_is_shown_though_nothing_is_added(run, clock):
    plans, sink = make_plans(2), MemorySink(clock)
    complete(run, plans[0], ppl=4.0)
    log = ArrivalLog(run, plans, [sink])
    log.begin()
    assert sink.written == []
    log.catch_up()
    log.end()
    assert sink.written == [1]


def test_short_stages_are_shown_together_and_the_last_at_the_end(run, clock):
    plans, sink = make_plans(100), MemorySink(clock)
    log = ArrivalLog(run, plans, [sink])
    log.begin()
    for plan in plans:
        complete(run, plan, ppl=4.0)
        clock[0] += 0.3
        log.note_stage()
        log.catch_up()
    log.end()
    log.end()
    assert len(sink.written) <= 1 + 1 + 30 / 10 + 1
    assert sink.written[-1] == 100


def test_a_slow_sink_takes_no_more_than_its_share_of_the_time(run, clock):
    plans, sink = make_plans(3), MemorySink(clock, seconds=5.0)
    log = ArrivalLog(run, plans, [sink])
    for plan in plans:
        complete(run, plan, ppl=4.0)
        log.note_stage()
        log.catch_up()
        clock[0] += 60.0
    assert sink.written == [1, 3]


def test_a_run_goes_on_when_its_curves_cannot_be_drawn(run, clock, capsys):
    plans, sink = make_plans(1), MemorySink(clock)
    log = ArrivalLog(run, plans, [sink])
    log.begin()
    complete(run, plans[0], ppl=4.0)
    sink.error = OSError(28, "No space left on device")
    log.catch_up()
    assert "No space left on device; the run goes on" in capsys.readouterr().err
    sink.error = None
    log.end()
    assert sink.written == [1]


def test_a_run_does_not_begin_when_its_curves_cannot_be_drawn(run, clock):
    sink = MemorySink(clock)
    sink.error = AlmaError("no login")
    with pytest.raises(AlmaError, match="no login"):
        ArrivalLog(run, make_plans(1), [sink]).begin()


def test_curves_go_where_the_user_wants_them(run, tmp_path):
    assert sinks_of(run, LiveLog()) == []
    names = [type(sink).__name__ for sink in sinks_of(run, LiveLog(tmp_path, "p"))]
    assert names == ["TensorBoardSink", "WandbSink"]
