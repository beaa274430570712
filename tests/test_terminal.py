"""What a user sees in a terminal, in a log, and after whoever read it has gone."""

import os
import pty
import subprocess
import sys

import pytest

from fairseq_alma.terminal import format_duration

SHOW = """
import sys
from fairseq_alma.terminal import LiveLine, print_line
with LiveLine() as line:
    line.every = line.next = 0.0
    for done in range(3):
        line.show(f"stage 1/3: {done}/2 updates of a long training" + "." * 200)
        print_line(f"result {done}", sys.stdout)
    print_line("\\x1b]0;owned\\x07", sys.stdout)
"""


def shown_in_terminal(code: str) -> str:
    """Return what a terminal gets of a process whose output goes there."""
    terminal, end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "40"}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=end, stdout=end, stderr=end, env=environment)
    os.close(end)
    shown = b""
    try:
        while part := os.read(terminal, 65536):
            shown += part
    except OSError:  # the other end is closed
        pass
    os.close(terminal)
    assert process.wait(timeout=600) == 0
    return shown.decode()


def test_a_live_line_fits_the_terminal_gives_way_to_results_and_names_cannot_steer_it():
    lines = shown_in_terminal(SHOW).replace("\r\n", "\n").split("\n")
    shown = "|".join(line.split("\x1b[2K")[-1] for line in lines)
    assert shown == r"result 0|result 1|result 2|\x1b]0;owned\x07|"
    assert lines[0].split("\x1b[2K")[1].rstrip("\r") == "stage 1/3: 0/2 updates of a long traini"


def test_a_log_gets_lines_without_escapes():
    ended = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[:3] == ["result 0", "result 1", "result 2"]
    assert ended.stderr.startswith("stage 1/3: 0/2 updates of a long training") and "\x1b" not in ended.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_work_continues_where_nobody_reads_any_more(stream):
    other = "stderr" if stream == "stdout" else "stdout"
    code = f"import sys\nsys.stdin.read(){SHOW}print('to its end', file=sys.{other})"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    getattr(process, stream).close()
    setattr(process, stream, None)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0
    assert (err if stream == "stdout" else out).splitlines()[-1] == "to its end"


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0:00"), (65, "1:05"), (3725.4, "1:02:05")])
def test_durations_have_hours_where_there_are_any(seconds, shown):
    assert format_duration(seconds) == shown
