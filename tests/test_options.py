import argparse
from dataclasses import dataclass
from typing import Optional

import pytest
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from omegaconf import OmegaConf

from fairseq_alma.options import Options, integer, opt, options_of, real
from fairseq_alma.training.stage_task import fairseq_config


@pytest.mark.parametrize(
    ("bounds", "text", "said"),
    [
        (integer(1), "0", "expected a number of at least 1"),
        (integer(1), "1" + "0" * 30, "expected a number of at most 2,147,483,647"),
        (integer(1), "2.5", "expected an integer"),
        (real(0, 1), "nan", "expected a number"),
        (real(0, 1), "inf", "expected a number of at most 1"),
        (real(0, above=True), "0", "expected a number above 0"),
        (real(0, 1, below=True), "1", "expected a number below 1"),
        (real(0), "1e31", "expected a number of at most 1e+30"),
    ],
)
def test_a_text_that_is_no_number_of_the_range_is_refused_with_what_is_needed(bounds, text, said):
    with pytest.raises(ValueError, match=rf"^{said.replace('+', '[+]')}$"):
        bounds.read(text)
    with pytest.raises(argparse.ArgumentTypeError, match=rf"^{said.replace('+', '[+]')}, found {text}$"):
        bounds(text)


@dataclass(frozen=True)
class Growth(Options):
    share: float = opt(0.25, "what grows", range=real(0, 1, above=True), metavar="X", shape=True)
    every: Optional[int] = opt(None, "when", range=integer(1), kinds=("images",), free=True)
    way: str = opt("copy", "how", choices=("copy", "split"))
    seeds: Optional[tuple[int, ...]] = opt(None, "of what", range=integer(0), flag="--seed", recorded=False)
    keeps: bool = opt(False, "whether 100 % stay")
    kept: bool = opt(False, "the same", recorded=False)


def parsed(*words: str) -> Growth:
    parser = argparse.ArgumentParser(prog="grow")
    Growth.add_to(parser)
    return Growth.read(parser.parse_args(words))


def test_what_was_given_is_read_and_the_rest_has_its_default():
    assert parsed() == Growth()
    assert parsed("--share", "0.5", "--seed", "3", "4", "--keeps") == Growth(0.5, None, "copy", (3, 4), True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--share 0", "grow: error: --share 0: expected a number above 0"),
        ("--seed 3 -1", "grow: error: --seed -1: expected a number of at least 0"),
        ("--way merge", "grow: error: argument --way: invalid choice: 'merge' (choose from 'copy', 'split')"),
    ],
)
def test_a_value_is_refused_while_it_is_parsed(words, said, capsys):
    with pytest.raises(SystemExit) as raised:
        parsed(*words.split())
    assert raised.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == said


def test_help_has_the_default_and_the_only_kind_of_data_of_an_option():
    parser = argparse.ArgumentParser()
    Growth.add_to(parser)
    text = " ".join(parser.format_help().split())
    assert "--share X what grows (default: 0.25)" in text
    assert "--every N images: when --way {copy,split}" in text
    assert "whether 100 % stay" in text


def test_the_record_has_what_binds_a_run_and_the_words_all_that_was_given():
    given = Growth(0.5, 2, "copy", (3,), True)
    assert given.record() == {"share": 0.5, "every": 2, "way": "copy", "keeps": True}
    assert given.record("text") == {"share": 0.5, "way": "copy", "keeps": True}
    assert Growth(way="split").record() == {"share": 0.25, "way": "split", "keeps": False}
    assert given.words()[:4] == ["--share", "0.5", "--every", "2"] and "--way" not in given.words()


def test_fairseq_takes_a_configuration_of_such_parts():
    made = fairseq_config("Made", FairseqDataclass, [Growth])
    parser = argparse.ArgumentParser()
    gen_parser_from_dataclass(parser, made())
    found = vars(parser.parse_args(["--share", "0.5", "--way", "split"]))
    assert (found["share"], found["way"], found["every"], found["keeps"]) == (0.5, "split", None, False)
    assert OmegaConf.structured(made).way == "copy"
    assert options_of(made)["share"].shape and options_of(made)["share"].range == real(0, 1, above=True)
    assert made.__module__ == __name__
