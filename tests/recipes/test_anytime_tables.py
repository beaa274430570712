"""The tables in the README of the anytime experiments are those that the kept records give."""

import importlib.util

import pytest

from tests.recipes.test_recipes import RECIPES

ANYTIME = RECIPES / "anytime"


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("anytime_tables", ANYTIME / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_come_from_the_kept_records(tables):
    text = (ANYTIME / "README.md").read_text()
    assert tables.rebuilt(text) == text
    shown = {name for _, name, _, _ in tables._BLOCK.findall(text)}
    assert shown == {path.name for path in ANYTIME.glob("*.json.xz")}
    assert text.count("<!-- tables ") == len(tables._BLOCK.findall(text)) > 3


def test_a_figure_that_is_not_the_records_is_found(tables):
    text = (ANYTIME / "README.md").read_text()
    head, begin, rest = text.partition("<!-- tables ")
    other = head + begin + rest.replace("| +0.", "| +9.", 1)
    assert other != text == tables.rebuilt(other)


def test_seeds_that_are_not_there_are_one_line(tables):
    with pytest.raises(SystemExit, match="no runs of these seeds"):
        tables.main(["--records", str(ANYTIME / "single_pass.json.xz"), "--seeds", "900-901"])
