"""Lines that show the progress and results of a run."""

import sys
import time

import pytest

import fairseq_alma.runs.loop
from fairseq_alma.learners.learner import stages
from fairseq_alma.runs.loop import RunDisplay, describe_stage
from tests.runs.runs import make_plans, plan_learner, stage_record

PLANS = make_plans(2, wait=3)


def test_stages_arrivals_and_megabatches_are_counted_from_one():
    assert describe_stage(PLANS[0], 2) == "stage 1/2, arrival 3 (mega-batches 1-3)"
    assert describe_stage(plan_learner("sm", stages(2, 1))[1], 2) == "stage 2/2, arrival 2 (mega-batch 2)"


def test_a_training_shows_loss_tokens_per_second_and_the_remaining_time(capsys, monkeypatch):
    monkeypatch.setattr(fairseq_alma.runs.loop, "LOG_EVERY_SECONDS", 0.0)
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with RunDisplay(PLANS, "token") as display, display.training(PLANS[0], PLANS[0].trainings[0], 100) as progress:
        for update in (10, 20):
            clock[0] += 10
            progress.update(update, 3.14159, 1234.5)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("stage 1/2, arrival 3 (mega-batches 1-3): 20/100 updates, loss 3.142 bits, 1,234 tokens/s")
    assert line.endswith("1:20 left")


def test_progress_is_rare_on_standard_error_and_results_are_on_standard_output(capsys):
    with RunDisplay(PLANS, "token") as display:
        with display.training(PLANS[0], None, None) as progress:
            for update in range(1000):
                progress.update(update)
        tested = {"loss": 2.0, "ppl": 4.0, "bits_per_byte": 0.5}
        display.completed(PLANS[0], stage_record(0, [0, 1, 2], test=tested))
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == 1
    assert "stage 1/2, arrival 3 (mega-batches 1-3): perplexity 4.00 on test, 0.500 bits per byte" in shown.out


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_a_progress_bar(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(fairseq_alma.runs.loop, "is_terminal", lambda stream: is_terminal)
    monkeypatch.setenv("FORCE_COLOR", "1") if is_terminal else None
    with RunDisplay(PLANS, "token") as display, display.training(PLANS[0], None, 10) as progress:
        progress.update(5)
        assert (display.progress is not None) == is_terminal
    assert display.progress is None and sys.stderr is not None
