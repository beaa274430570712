import os

import pytest

from fairseq_alma.errors import AlmaError
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.watch import sinks
from fairseq_alma.watch.sinks import ArrivalCurves, CurveOptions, arrival_points
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
    monkeypatch.setattr(sinks.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "R")
    run.write_run(RUN)
    return run


def test_what_was_complete_before_is_shown_though_nothing_is_added(run, clock):
    plans, sink = make_plans(2), MemorySink(clock)
    complete(run, plans[0], ppl=4.0)
    curves = ArrivalCurves(run, plans, [sink])
    curves.begin()
    assert sink.written == []
    curves.catch_up()
    curves.end()
    assert sink.written == [1]


def test_short_stages_are_shown_together_and_the_last_at_the_end(run, clock):
    plans, sink = make_plans(100), MemorySink(clock)
    curves = ArrivalCurves(run, plans, [sink])
    curves.begin()
    for plan in plans:
        complete(run, plan, ppl=4.0)
        clock[0] += 0.3
        curves.note_stage()
        curves.catch_up()
    curves.end()
    curves.end()
    assert len(sink.written) <= 1 + 1 + 30 / 10 + 1
    assert sink.written[-1] == 100


def test_a_slow_sink_takes_no_more_than_its_share_of_the_time(run, clock):
    plans, sink = make_plans(3), MemorySink(clock, seconds=5.0)
    curves = ArrivalCurves(run, plans, [sink])
    for plan in plans:
        complete(run, plan, ppl=4.0)
        curves.note_stage()
        curves.catch_up()
        clock[0] += 60.0
    assert sink.written == [1, 3]


def test_training_continues_when_its_curves_cannot_be_drawn(run, clock, capsys):
    plans, sink = make_plans(1), MemorySink(clock)
    curves = ArrivalCurves(run, plans, [sink])
    curves.begin()
    complete(run, plans[0], ppl=4.0)
    sink.error = OSError(28, "No space left on device")
    curves.catch_up()
    assert "No space left on device; training continues" in capsys.readouterr().err
    sink.error = None
    curves.end()
    assert sink.written == [1]


def test_a_run_does_not_begin_when_its_curves_cannot_be_drawn(run, clock):
    sink = MemorySink(clock)
    sink.error = AlmaError("no login")
    with pytest.raises(AlmaError, match="no login"):
        ArrivalCurves(run, make_plans(1), [sink]).begin()


def test_curves_go_where_the_user_wants_them(run, tmp_path):
    assert CurveOptions().sinks(run) == []
    names = [type(sink).__name__ for sink in CurveOptions(tmp_path, "p").sinks(run)]
    assert names == ["TensorBoardSink", "WandbSink"]


def figure(points, name):
    return {point.arrival: point.figures[name] for point in points}


def test_each_complete_stage_is_a_point_at_the_arrival_that_began_it(run):
    plans = make_plans(3)
    complete(run, plans[0], ppl=40.0)
    complete(run, plans[1], ppl=30.0, train_flops=7000)
    os.utime(run.stage_folder(0) / "stage.json", (1000.0, 1000.0))
    points = arrival_points(run, plans)
    assert figure(points, "test/ppl") == {0: 40.0, 1: 30.0}
    assert figure(points, "stage/train_flops") == {0: 5000.0, 1: 7000.0}
    assert figure(points, "total/train_flops") == {0: 5000.0, 1: 12000.0}
    assert points[0].seconds == 1000.0
    assert set(points[0].figures) == {
        "test/loss", "test/ppl", "valid/loss", "valid/ppl", "stage/num_params", "stage/num_experts",
        "stage/num_members", "stage/num_updates", "stage/train_tokens", "stage/train_flops",
        "stage/test_flops_per_token", "stage/wall_seconds", "total/train_flops",
    }  # fmt: skip


def test_while_a_learner_waits_the_model_of_its_last_update_counts_and_costs_nothing(run):
    plans = make_plans(2, wait=3)
    complete(run, plans[0], ppl=40.0)
    assert figure(arrival_points(run, plans), "test/ppl") == {2: 40.0}
    complete(run, plans[1], ppl=30.0)
    points = arrival_points(run, plans)
    assert figure(points, "test/ppl") == {2: 40.0, 3: 40.0, 4: 40.0, 5: 30.0}
    assert figure(points, "stage/num_params") == {2: 7.0, 3: 7.0, 4: 7.0, 5: 7.0}
    assert figure(points, "stage/train_flops") == {2: 5000.0, 3: 0.0, 4: 0.0, 5: 5000.0}
    assert figure(points, "total/train_flops") == {2: 5000.0, 3: 5000.0, 4: 5000.0, 5: 10000.0}


def test_nothing_is_carried_over_a_stage_that_is_missing(run):
    plans = make_plans(3, wait=2)
    complete(run, plans[0], ppl=40.0)
    complete(run, plans[2], ppl=20.0)
    assert figure(arrival_points(run, plans), "test/ppl") == {1: 40.0, 5: 20.0}


def test_figures_right_after_growth_and_of_images_keep_their_names(run):
    (plan,) = make_plans(1)
    of_images = {"train_images": 1000, "test_flops_per_image": 3, "valid": {"loss": 0.2, "error": 0.05}}
    grown = {"valid": {"loss": 5.0, "error": 0.5}}
    complete(run, plan, ppl=4.0, test={"loss": 0.1, "error": 0.03}, after_growth=grown, **of_images)
    (point,) = arrival_points(run, [plan])
    assert point.figures["test/error"] == 0.03
    assert point.figures["after_growth/valid/loss"] == 5.0
