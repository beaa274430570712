"""What a user sees in a terminal, in a log, and after whoever read it has gone."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from fairseq_alma.terminal import shell_words, spell_duration

SHOW = """
import sys
from fairseq_alma.terminal import LiveLine, tell
line = LiveLine(every=0.0)
for done in range(3):
    line.show(f"stage 1/3: {done}/2 updates of a long training", done, 2, [f"stage: {done}/2"])
    tell(f"result {done}", sys.stdout)
line.show("testing")
line.clear()
"""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run_in_terminal(code: str, columns: int = 80, **environment: str) -> str:
    """Return what a terminal gets of a process whose output goes there."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    names = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=end,
        stdout=end,
        stderr=end,
        env={**names, "TERM": "xterm-256color", **environment},
    )
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


def visible(shown: str) -> list[str]:
    """What is left on the screen."""
    return [ESCAPES.sub("", line.split("\r")[-1]) for line in shown.replace("\r\n", "\n").split("\n")]


@pytest.mark.parametrize("columns", [80, 40, 12, 1])
def test_a_live_line_fits_the_terminal_and_gives_way_to_results(columns):
    shown = run_in_terminal(SHOW, columns)
    assert visible(shown) == ["result 0", "result 1", "result 2", ""]
    frames = [ESCAPES.sub("", frame) for frame in re.split(r"[\r\n]+", shown)]
    live = [frame for frame in frames if not frame.startswith("result")]
    assert max(len(frame) for frame in live) < max(columns, 2)
    if columns >= 40:
        text = "stage 1/3: 1/2 updates of a long training ━" if columns == 80 else "stage: 1/2 ━"
        assert any(frame.startswith(text) for frame in live)


def test_a_terminal_that_is_made_narrower_gets_a_shorter_line():
    narrower = "import fcntl, struct, termios; fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 30, 0, 0))"
    frames = run_in_terminal(f"{SHOW}{narrower}{SHOW}").split("result 2")[1:]
    assert max(len(frame) for frame in re.split(r"[\r\n]+", ESCAPES.sub("", frames[0]))) == 29


def test_colors_are_left_out_where_they_are_not_wanted():
    assert "\x1b[38;" in run_in_terminal(SHOW)
    assert set(ESCAPES.findall(run_in_terminal(SHOW, NO_COLOR="1"))) == {"\x1b[2K"}


def test_a_terminal_that_cannot_erase_gets_lines():
    shown = run_in_terminal(SHOW, TERM="dumb")
    assert "\x1b" not in shown
    assert shown.replace("\r\n", "\n").splitlines()[:2] == ["stage 1/3: 0/2 updates of a long training", "result 0"]


def test_a_terminal_that_knows_no_unicode_gets_a_bar_of_ascii():
    shown = run_in_terminal(SHOW, PYTHONIOENCODING="ascii")
    assert shown.isascii() and "training ---" in ESCAPES.sub("", shown)


def test_a_log_gets_lines_without_escapes_and_rich_is_not_imported():
    code = f"{SHOW}\nassert not [name for name in sys.modules if name.startswith('rich')]"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "result 0\nresult 1\nresult 2\n"
    assert ended.stderr.splitlines()[0] == "stage 1/3: 0/2 updates of a long training"
    assert "\x1b" not in ended.stderr and "\r" not in ended.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_work_continues_where_nobody_reads_any_more(stream):
    other = "stderr" if stream == "stdout" else "stdout"
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys\nsys.stdin.read(){SHOW}print('to its end', file=sys.{other})"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    getattr(process, stream).close()
    setattr(process, stream, None)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0
    assert (err if stream == "stdout" else out).splitlines()[-1] == "to its end"


def test_work_continues_when_the_terminal_is_closed(tmp_path):
    terminal, end = pty.openpty()
    code = f"import sys, signal\nsys.stdin.read()\n{SHOW}\nopen({str(tmp_path / 'end')!r}, 'w').close()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=end,
        stderr=end,
        env={**os.environ, "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(end)
    os.close(terminal)
    process.communicate(timeout=600)
    assert process.returncode == 0
    assert (tmp_path / "end").exists()


def test_a_full_disk_is_not_taken_for_a_reader_that_has_gone():
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", SHOW], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode != 0
    assert "No space left on device" in ended.stderr


def test_names_cannot_steer_the_terminal():
    code = "name = '\\x1b]0;owned\\x07run'; LiveLine().show(name); tell(name, sys.stdout); tell(name, sys.stderr)"
    shown = run_in_terminal(f"import sys\nfrom fairseq_alma.terminal import LiveLine, tell\n{code}")
    assert "\x1b]" not in shown and "\x07" not in shown
    assert shown.count(r"\x1b]0;owned\x07run") == 3


@pytest.mark.parametrize(("seconds", "spelled"), [(0.4, "0:00"), (65, "1:05"), (3725.4, "1:02:05")])
def test_durations_are_spelled_with_hours_where_there_are_any(seconds, spelled):
    assert spell_duration(seconds) == spelled


def test_words_for_a_shell_are_what_they_were_and_steer_no_terminal():
    words = ["a b", "it's", "\x1b[31m0", "caf\udce9", "tab\t'\\\\x", "é→", "", "a\nb", "100%\x07 $HOME"]
    assert shell_words(words).isprintable()
    words.append("end\n\n")
    spelled = shell_words(words)
    done = subprocess.run(["sh", "-c", f"printf '%s\\0' {spelled}"], capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in words]
