import sys

import pytest

from fairseq_alma.learners.learner import ModelId
from fairseq_alma.terminal import ERASE, LiveLine
from fairseq_alma.watch.progress import Forecast, StageProgress


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_progress_away_from_a_terminal_is_a_line_now_and_then(capsys, clock):
    progress = StageProgress("stage 0/0", "word", max_update=120)
    for seconds in range(0, 41, 2):
        progress.update(seconds, loss=7.012, rate=1234.5)
        clock[0] += 2
    assert lines(capsys) == [
        "stage 0/0: 0/120 updates",
        "stage 0/0: 16/120 updates, loss 7.012 bits, 1,234 words/s, 1:44 left",
        "stage 0/0: 32/120 updates, loss 7.012 bits, 1,234 words/s, 1:28 left",
    ]


def test_images_are_counted_in_nats_and_images_per_second(capsys):
    progress = StageProgress("s", "image", max_update=10, line=LiveLine(every=0.0))
    progress.update(4, loss=0.5, rate=20_000)
    assert lines(capsys)[1] == "s: 4/10 updates, loss 0.500 nats, 20,000 images/s"


def test_an_unknown_rate_or_loss_is_left_out(capsys):
    progress = StageProgress("s", "image", line=LiveLine(every=0.0))
    progress.update(4, rate=float("inf"))
    assert lines(capsys) == ["s: 0 updates", "s: 4 updates"]


def test_trainings_that_share_a_line_share_the_lines(capsys, clock):
    line = LiveLine()
    for stage in range(500):
        progress = StageProgress(f"stage {stage}", "image", 3, line=line)
        for update in range(1, 4):
            clock[0] += 0.04
            progress.update(update, loss=1.0, rate=100.0)
    assert 4 <= len(lines(capsys)) <= 1 + 500 * 0.12 / 15


def test_a_loss_that_is_not_shown_is_not_looked_at():
    class Tensor:
        def __float__(self):
            raise AssertionError("fetched from the device")

    progress = StageProgress("s", "image", 3)
    progress.update(1, loss=Tensor(), rate=Tensor())
    assert progress.num_updates == 1


def test_a_call_that_shows_nothing_calls_next_to_nothing(clock):
    progress = StageProgress("s", "image", 100_000)
    progress.update(0, loss=1.0, rate=1.0)
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    for update in range(1, 1001):
        progress.update(update, loss=1.0, rate=1.0)
    sys.setprofile(None)
    assert len(calls) < 100 * 1000  # some microseconds


def test_the_seconds_of_a_training_include_those_of_earlier_launches(clock):
    progress = StageProgress("s", "word", max_update=100, done=20)
    assert progress.seconds() == (None, None)
    clock[0] += 10
    progress.update(20)
    clock[0] += 30
    progress.update(50)
    # One second for each update: 10 of a start, 30 now, 20 before, 50 to come.
    assert progress.seconds() == (110.0, 50.0)


def test_the_rest_of_the_run_is_shown_beside_that_of_the_stage(capsys, clock):
    progress = StageProgress("s", "word", 10, line=LiveLine(every=0.0), run_left=lambda whole, rest: rest and 10 * rest)
    progress.update(0)
    clock[0] += 5
    progress.update(5)
    assert lines(capsys)[-1] == "s: 5/10 updates, 0:05 left, 0:50 left in the run"


def test_a_terminal_shows_one_line_that_is_written_over(open_terminal, clock):
    terminal = open_terminal(100)
    progress = StageProgress("stage 1/3", "image", 40)
    for update in (10, 20):
        clock[0] += 1
        progress.update(update, loss=0.25, rate=99.0)
    progress.line.clear()
    shown = terminal.getvalue()
    assert "\n" not in shown
    frames = shown.split(ERASE)
    assert frames[-2].startswith("stage 1/3: 20/40 updates, loss 0.250 nats, 99 images/s, 0:02 left ━")
    assert frames[-1] == ""  # for what is printed next


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (150, "stage 1/3, arrival 5 (mega-batches 4-5): 20/40 updates, loss 0.250 nats, 99 images/s, 0:02 left, "
              "1:00 left in the run ━"),
        (120, "stage 1/3, arrival 5: 20/40 updates, loss 0.250 nats, 99 images/s, 0:02 left, 1:00 left in the run ━"),
        (100, "stage 1/3, arrival 5: 20/40, loss 0.250 nats, 99 images/s, 0:02 left, run 1:00 ━"),
        (80, "stage 1/3, arrival 5: 20/40, loss 0.250 nats, 99 images/s, 0:02 left ━"),
        (70, "stage 1/3: 20/40, loss 0.250 nats, 99 images/s, 0:02 left ━"),
        (60, "stage 1/3: 20/40, loss 0.250 nats, 0:02 left ━"),
        (40, "stage 1/3: 20/40, 0:02 left ━"),
        (20, "stage 1/3: 20/40, 0"),
    ],
)  # fmt: skip
def test_the_time_left_is_shown_on_a_narrow_terminal_too(columns, text, open_terminal, clock):
    terminal = open_terminal(columns)
    left = lambda whole, rest: rest and 60.0  # noqa: E731
    progress = StageProgress("stage 1/3, arrival 5 (mega-batches 4-5)", "image", 40, run_left=left)
    for update in (10, 20):
        clock[0] += 1
        progress.update(update, loss=0.25, rate=99.0)
    progress.line.clear()
    frames = terminal.getvalue().split(ERASE)
    assert frames[-2].startswith(text)
    assert max(len(frame) for frame in frames) < columns


def test_nothing_is_forecast_before_anything_is_known():
    assert Forecast({ModelId(0, 0): 1.0}).seconds_left([ModelId(0, 0)]) is None


def test_trainings_ahead_are_taken_to_last_as_long_as_those_that_are_over():
    forecast = Forecast({ModelId(stage, 0): 1.0 for stage in range(4)})
    forecast.finish([ModelId(0, 0)], 50.0)
    forecast.finish([], 10.0)  # a test
    assert forecast.seconds_left() == 180.0
    # The second training takes 30 in all: the mean of both, its test apart, is 45.
    assert forecast.seconds_left([ModelId(1, 0)], whole=30.0, rest=10.0) == 10.0 + 2 * 45.0


def test_the_first_training_forecasts_the_others():
    forecast = Forecast({ModelId(stage, 0): 1.0 for stage in range(3)})
    assert forecast.seconds_left([ModelId(0, 0)], whole=100.0, rest=60.0) == 260.0


def test_more_data_takes_longer():
    forecast = Forecast({ModelId(0, 0): 10.0, ModelId(1, 0): 20.0, ModelId(2, 0): 30.0})
    forecast.finish([ModelId(0, 0)], 5.0)
    assert forecast.seconds_left() == pytest.approx(25.0)


def test_trainings_that_are_there_already_cost_nothing():
    forecast = Forecast({ModelId(0, member): 1.0 for member in range(3)})
    forecast.drop([ModelId(0, 1)])
    forecast.finish([ModelId(0, 0)], 7.0)
    assert forecast.seconds_left() == 7.0
