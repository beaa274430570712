from fairseq_alma.learners.progress import (
    StageProgress,
    StageReporter,
    describe_stage,
    parse_log_line,
    watch_fairseq,
)
from fairseq_alma.learners.schedule import stages
from fairseq_alma.learners.strategy import LearnerOptions, plan_stages

LINE = (
    '2026-01-01 00:00:00 | INFO | train_inner | {"epoch": 1, "update": 0.1, "loss": "7.1", "nll_loss": "7.012", '
    '"wps": "1234.5", "num_updates": "40"}'
)


def test_figures_are_read_from_fairseqs_lines_and_from_no_others():
    assert parse_log_line(LINE)["num_updates"] == "40"
    assert parse_log_line("2026-01-01 | INFO | fairseq_cli.train | {'a': 1}") is None
    assert parse_log_line("2026-01-01 | INFO | train_inner | {broken") is None
    assert parse_log_line("") is None


def test_a_stage_is_named_with_its_megabatches():
    plans = plan_stages("sm", LearnerOptions(seed=1), stages(4, 3))
    assert describe_stage(plans[0], 2) == "stage 0/1 (mega-batches 0-2)"
    assert describe_stage(plans[1], 2) == "stage 1/1 (mega-batch 3)"


def test_progress_away_from_a_terminal_is_a_line_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr("fairseq_alma.learners.progress.LINE_EVERY_SECONDS", 0.0)
    with StageProgress("stage 0/0", "word", 120) as progress:
        watch = watch_fairseq(progress, words_per_token=0.5)
        watch("nothing of interest")
        watch(LINE)
        watch(LINE.replace('"40"', '"80"'))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "stage 0/0: training"
    assert lines[1] == "stage 0/0: 40/120 updates, loss 7.012 bits, 617 words/s"
    assert lines[2] == "stage 0/0: 80/120 updates, 0:00 left, loss 7.012 bits, 617 words/s"
    assert len(lines) == 3


def test_a_completed_stage_is_one_line_on_standard_output(capsys):
    (plan,) = plan_stages("sm", LearnerOptions(seed=1), stages(1, 1))
    record = {
        "test": {"loss": 2.0, "ppl": 4.0}, "valid": {"loss": 3.0, "ppl": 8.0}, "num_updates": 1500,
        "num_params": 1721088, "wall_seconds": 3725.4,
    }  # fmt: skip
    StageReporter(1).completed(plan, record)
    assert capsys.readouterr().out == (
        "stage 0/0 (mega-batch 0): perplexity 4.00 on test, 8.00 on valid, "
        "1,500 updates, 1,721,088 parameters, 1:02:05\n"
    )
