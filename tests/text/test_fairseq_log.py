import pytest

from fairseq_alma.terminal import LiveLine
from fairseq_alma.text.fairseq_log import parse_log_line, watch_fairseq
from fairseq_alma.watch.progress import StageProgress

LINE = (
    '2026-01-01 00:00:00 | INFO | train_inner | {"epoch": 1, "update": 0.25, "loss": "7.1", "nll_loss": "7.012", '
    '"wps": "1234.5", "num_updates": "40"}'
)


def test_figures_are_read_from_fairseqs_lines_and_from_no_others():
    assert parse_log_line(LINE)["num_updates"] == "40"
    assert parse_log_line("2026-01-01 | INFO | fairseq_cli.train | {'a': 1}") is None
    assert parse_log_line("2026-01-01 | INFO | train_inner | {broken") is None
    assert parse_log_line("") is None


def test_bits_per_token_and_words_per_second_are_shown(capsys):
    progress = StageProgress("s", "word", 120, line=LiveLine(every=0.0))
    watch = watch_fairseq(progress, words_per_token=0.5)
    watch("nothing of interest")
    watch(LINE)
    assert capsys.readouterr().err.splitlines()[1:] == ["s: 40/120 updates, loss 7.012 bits, 617 words/s"]


@pytest.mark.parametrize(("max_update", "max_epoch", "expected"), [(None, 2, 320), (100, 2, 100), (400, 2, 320)])
def test_updates_are_counted_from_epochs_where_epochs_end_the_training(max_update, max_epoch, expected):
    progress = StageProgress("s", "word", max_update)
    watch_fairseq(progress, 1.0, max_epoch)(LINE)
    assert progress.max_update == expected
