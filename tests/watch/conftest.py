"""A clock and a terminal of the tests' own."""

import io
import sys
import time

import pytest


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def open_terminal(monkeypatch):
    """Puts a terminal in place of standard error; in the test, as pytest replaces it between set-up and test."""

    def opened(columns=80):
        for name, value in (("TERM", "xterm"), ("NO_COLOR", "1"), ("COLUMNS", str(columns))):
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr

    return opened
