import pytest

from fairseq_alma.terminal import ERASE
from fairseq_alma.watch.run_display import HeldLines, RunDisplay, describe_stage
from tests.runs.runs import make_plans

RECORD = {
    "test": {"loss": 2.0, "ppl": 4.0}, "valid": {"loss": 3.0, "ppl": 8.0}, "num_updates": 1500, "num_params": 1721088,
    "wall_seconds": 3725.4,
}  # fmt: skip


def test_a_stage_is_named_with_its_arrival_and_its_megabatches():
    assert describe_stage(make_plans(4)[3], 4) == "stage 3/3, arrival 3 (mega-batch 3)"
    assert describe_stage(make_plans(2, wait=3)[1], 2) == "stage 1/1, arrival 5 (mega-batches 3-5)"
    assert describe_stage(make_plans(4, replay=True)[2], 4) == "stage 2/3, arrival 2 (mega-batches 0-2)"


def test_a_completed_stage_is_one_line_on_standard_output(capsys):
    (plan,) = make_plans(1)
    RunDisplay([plan], "word").completed(plan, RECORD)
    assert capsys.readouterr().out == (
        "stage 0/0, arrival 0 (mega-batch 0): perplexity 4.00 on test, 8.00 on valid, "
        "1,500 updates, 1,721,088 parameters, 1:02:05\n"
    )


def test_a_stage_of_images_is_told_with_its_error(capsys):
    (plan,) = make_plans(1)
    record = {**RECORD, "test": {"loss": 0.1, "error": 0.0312}, "valid": {"loss": 0.1, "error": 0.03}}
    RunDisplay([plan], "image").completed(plan, record)
    assert "error 3.12% on test, 3.00% on valid" in capsys.readouterr().out


def run_through(display, planned, clock, seconds_of_a_stage):
    with display:
        for plan in planned:
            for training in plan.trainings:
                with display.training(plan, training, 2) as progress:
                    progress.update(1, 1.0, 5.0)
                    clock[0] += seconds_of_a_stage / len(plan.trainings)
                    progress.update(2, 1.0, 5.0)
            display.say(plan, "testing")
            display.completed(plan, RECORD)


def test_five_hundred_short_stages_do_not_flood_a_log_and_the_last_is_told(capsys, clock):
    planned = make_plans(500)
    run_through(RunDisplay(planned, "image"), planned, clock, 0.1)
    out, err = capsys.readouterr()
    results = out.splitlines()
    assert 10 < len(results) <= 10 + 50 / 5 + 1
    assert results[-1].startswith("stage 499/499")
    assert 1 < len(err.splitlines()) <= 1 + 50 / 15


def test_long_stages_are_all_told_with_the_time_left(capsys, clock):
    planned = make_plans(3)
    run_through(RunDisplay(planned, "word"), planned, clock, 100)
    out, err = capsys.readouterr()
    ends = [line.split(", ")[-1] for line in out.splitlines()]
    assert ends == ["3:20 left in the run", "1:40 left in the run", "1:02:05"]
    assert err.splitlines()[1] == (
        "stage 0/2, arrival 0 (mega-batch 0): 2/2 updates, loss 1.000 bits, 5 words/s, 0:00 left, 3:20 left in the run"
    )


def test_stages_of_an_earlier_launch_forecast_the_rest(capsys, clock):
    planned = make_plans(3)
    display = RunDisplay(planned, "word")
    display.skipped(planned[0], {**RECORD, "wall_seconds": 50.0})
    with display.training(planned[1], planned[1].trainings[0], 10):
        pass
    assert capsys.readouterr().err.splitlines() == [
        "stage 1/2, arrival 1 (mega-batch 1): 0/10 updates, 1:40 left in the run"
    ]


def test_members_are_named_where_a_stage_trains_several(capsys, clock):
    planned = make_plans(1, num_members=2)
    display = RunDisplay(planned, "word")
    for training in planned[0].trainings:
        clock[0] += 20
        with display.training(planned[0], training, 2):
            pass
    assert [line.split(": ")[0][-8:] for line in capsys.readouterr().err.splitlines()] == ["member 0", "member 1"]


def test_members_that_are_trained_at_once_are_one_training(capsys, clock):
    planned = make_plans(3, num_members=5)
    display = RunDisplay(planned, "image")
    clock[0] += 1000  # loading, once
    for plan in planned[:2]:
        with display.training(plan, None, 10) as progress:
            progress.update(0)
            clock[0] += 50
            progress.update(5)
            clock[0] += 50
            progress.update(10)
    assert capsys.readouterr().err.splitlines()[:2] == [
        "stage 0/2, arrival 0 (mega-batch 0): 0/10 updates",
        "stage 0/2, arrival 0 (mega-batch 0): 5/10 updates, 0:50 left, 4:10 left in the run",
    ]
    assert display.forecast.seconds_left() == 100.0


def test_what_could_not_be_trained_is_still_ahead():
    planned = make_plans(2, num_members=2)
    display = RunDisplay(planned, "word")
    with pytest.raises(KeyError), display.training(planned[0], None, 10):
        raise KeyError
    assert len(display.forecast.ahead) == 4
    with display.training(planned[0], None, 10) as progress:
        progress.took_place = False
    assert len(display.forecast.ahead) == 4
    with display.training(planned[0], None, 10):
        pass
    assert len(display.forecast.ahead) == 2


def test_the_rest_of_the_run_is_only_what_this_command_does():
    planned = make_plans(4, num_members=3)
    assert len(RunDisplay(planned, "word").forecast.ahead) == 12
    assert len(RunDisplay(planned, "word", only=2).forecast.ahead) == 3
    assert len(RunDisplay(planned, "word", members=[1]).forecast.ahead) == 4


def test_a_terminal_has_one_live_line_that_gives_way_to_results(open_terminal, capsys):
    terminal = open_terminal()
    (plan,) = make_plans(1)
    with RunDisplay([plan], "word") as display:
        display.say(plan, "testing on valid")
        display.say(plan, "testing on test")
        display.completed(plan, RECORD)
    shown = terminal.getvalue()
    assert "\n" not in shown
    assert "testing on valid" in shown and "testing on test" in shown
    assert shown.endswith(ERASE)
    assert "perplexity 4.00" in capsys.readouterr().out


def test_a_line_held_back_is_printed_when_its_time_has_come(capsys, clock):
    lines = HeldLines(num_at_once=1, seconds=5.0)
    lines.hold("first")
    lines.release()
    lines.hold("second")
    lines.hold("third")
    lines.release()
    assert capsys.readouterr().out == "first\n"
    clock[0] += 6
    lines.release()
    lines.release(at_end=True)
    assert capsys.readouterr().out == "third\n"


class Log:
    def __init__(self):
        self.told = []

    def begin(self):
        self.told.append("begin")

    def note_stage(self):
        self.told.append("stage")

    def catch_up(self):
        self.told.append("show")

    def end(self):
        self.told.append("end")


def test_curves_are_drawn_before_and_after_stages_and_at_the_end():
    log, (plan,) = Log(), make_plans(1)
    with RunDisplay([plan], "word", curves=log) as display:
        with display.training(plan, None, 10):
            pass
        display.completed(plan, RECORD)
    assert log.told == ["begin", "show", "stage", "show", "end"]


@pytest.mark.parametrize(("error", "told"), [(ValueError, ["begin", "end"]), (KeyboardInterrupt, ["begin"])])
def test_who_interrupts_does_not_wait_for_curves(error, told):
    log = Log()
    with pytest.raises(error), RunDisplay(make_plans(1), "word", curves=log):
        raise error
    assert log.told == told
