"""Any words after any option of any command: it is read, or refused in one line with status 2 or 1; never a traceback.

Only what reads the command line runs here, within the front that all commands have.
"""

import argparse
import contextlib
import io
from pathlib import Path
from typing import Any, Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep.images import command as image_prep_options
from data_prep.text import options as text_prep_options
from fairseq_alma.checkpoints.model_options import GrowOptions
from fairseq_alma.cli import ensemble, grow, report, stream, update
from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.images.image_train_options import ImageTrainOptions
from fairseq_alma.learners.learner import SingleModel
from fairseq_alma.runs.study import RunRequest
from fairseq_alma.text.train_options import TrainOptions
from tests.text.test_recipe import made

CHEAP = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NUMBERS = st.integers().map(str) | st.floats().map(str) | st.sampled_from(
    ["-1", "0", "1" + "0" * 30, "9223372036854775808", "nan", "inf", "-inf", "1e-400", "1_000", "9" * 5000, "٣", "0x10"]
)  # fmt: skip
# Bytes that are not UTF-8 reach a command as the halves of pairs from U+DC80 on.
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0") | st.sampled_from("\udc80\udcff\x1b\n\u202e"))
WORDS = (
    NUMBERS | TEXTS | st.sampled_from(["", "-", "--", "=", "x" * 5000, "/dev/full", "\x1b]0;title\x07", "{a}", "%s"])
)

TRAIN = ["--arch", "alma_switch_lm_tiny", "--max-update", "10"]
OWN = ["--num-experts", "--dropout", "--capacity-factor", "--lr", "--max-update", "--batch-size", "--update-freq", "--optimizer"]


def read_grow(argv: Sequence[str]) -> None:
    parser = grow.parser()
    grow._check(parser, GrowOptions.read(parser.parse_args(argv)))


def read_ensemble(argv: Sequence[str]) -> None:
    parser = ensemble.build_parser()
    ensemble._check(parser, ensemble.EnsembleOptions.read(parser.parse_intermixed_args(argv)))


def read_stream(argv: Sequence[str]) -> None:
    parser, arguments, _, _ = stream.read_arguments(argv)
    learner, given = stream.learner_options(parser, arguments, "images")
    request = RunRequest.of(arguments, learner, given)
    try:
        request.check("images")
        request.plan(request.build_learner("images", 1), "images", 20)
    except ValueError as error:
        parser.error(str(error))


def read_train_options(argv: Sequence[str]) -> None:
    try:
        TrainOptions(argv).joint(2)
    except ValueError as error:
        Parser().error(str(error))


def read_recipe(argv: Sequence[str]) -> None:
    try:
        TrainOptions(made(argv).words)
    except ValueError as error:
        Parser().error(str(error))


def read_image_train_options(argv: Sequence[str]) -> None:
    try:
        ImageTrainOptions(argv, SingleModel, for_photographs=False)
    except ValueError as error:
        Parser().error(str(error))


def flags_of(parser: argparse.ArgumentParser, *left_out: str) -> list[str]:
    found = [flag for action in parser._actions for flag in action.option_strings]
    return [flag for flag in found if flag not in ("-h", "--help", *left_out)]


def flags_of_images(dataset: str) -> list[str]:
    parsers = next(action for action in image_prep_options._parser()._actions if action.dest == "dataset")
    return flags_of(parsers.choices[dataset])  # type: ignore[call-overload, index]


ARRAYS = ["arrays", "--images", "x.npy", "--labels", "y.npy", "--out", "S", "--megabatches", "2"]
Reader = Callable[[Sequence[str]], Any]
COMMANDS: dict[str, tuple[Reader, list[str], list[str]]] = {
    "prep-text": (
        text_prep_options.parse_options,
        ["a.txt", "--out", "S", "--megabatches", "2"],
        flags_of(text_prep_options._parser()),
    ),
    "prep-images": (image_prep_options.parse_options, ARRAYS, flags_of_images("arrays")),
    "grow": (
        read_grow,
        ["--path", "c.pt", "--out", "g.pt", "--method", "copy", "--experts", "1", "--select", "random"],
        flags_of(grow.parser()),
    ),
    "ensemble": (read_ensemble, ["a.pt", "b.pt", "--out", "e.pt"], flags_of(ensemble.build_parser())),
    "report": (lambda argv: report.build_parser().parse_args(argv), ["R"], flags_of(report.build_parser())),
    "stream": (
        read_stream,
        ["--stream", "S", "--run", "R"],
        # what that option names is imported
        flags_of(stream.build_parser(), stream.LEARNERS_FROM),
    ),
    "options for fairseq-train": (read_train_options, TRAIN, [*OWN, "--sample-break-mode"]),
    "update": (lambda argv: update.build_parser().parse_args(argv), ["M", "a.txt"], flags_of(update.build_parser())),
    "recipe": (read_recipe, [], [*OWN, "--arch", "--lr-scheduler"]),
    "options for images": (read_image_train_options, [], ["--lr", "--max-epoch", "--batch-size", "--optimizer", "--gate", "--adam-betas"]),
}


@pytest.mark.parametrize("name", COMMANDS)
@CHEAP
@given(data=st.data())
def test_any_words_are_read_or_refused_in_one_line(name: str, data: Any, tmp_path: Path, monkeypatch) -> None:
    read, base, flags = COMMANDS[name]
    monkeypatch.chdir(tmp_path)
    chosen = data.draw(st.lists(st.tuples(st.sampled_from(flags), st.lists(WORDS, max_size=2)), max_size=3))
    words = [*base, *(word for flag, values in chosen for word in (flag, *values))]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            command(lambda argv: read(argv or []))(words)
    except SystemExit as error:
        message = error.code if isinstance(error.code, str) else said.getvalue().splitlines()[-1]
        assert error.code == 2 or isinstance(error.code, str)
        assert message.isprintable()
        assert len(message) < 10_000
        message.encode()
