"""The tables in the README of the anytime experiments are those that the kept records give."""

import subprocess
import sys

import pytest

from tests.recipes.test_recipes import RECIPES

ANYTIME = RECIPES / "anytime"


@pytest.mark.parametrize("records", sorted(ANYTIME.glob("*.json.xz")), ids=lambda path: path.name)
def test_the_tables_come_from_the_kept_records(records):
    command = [sys.executable, str(ANYTIME / "tables.py"), "--records", str(records)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    readme = (ANYTIME / "README.md").read_text()
    lines = [line for line in done.stdout.splitlines() if line]
    assert len(lines) > 4
    assert all(line in readme for line in lines)
