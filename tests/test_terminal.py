"""What a user of a command sees: lines in a terminal and in a log, and one line with an exit status after a fault."""

import argparse
import errno
import io
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_alma.errors import AlmaError, refuse_no_file, refuse_no_folder
from fairseq_alma.terminal import Parser, command, format_duration

HEAD = """
import os, sys, time
from fairseq_alma.terminal import command
from fairseq_alma.errors import AlmaError
@command
def main(argv=None):
    """
HANG = "while True: time.sleep(0.1)"  # a signal right before a sleep is handled after it

# standard output is buffered, as in a shell: a short output is written when the command ends
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def start(body: str, **options) -> subprocess.Popen:
    """Start a process that runs the body as a command's ``main``."""
    words = [sys.executable, "-c", f"{HEAD}{body}\nsys.exit(main())"]
    return subprocess.Popen(words, stderr=subprocess.PIPE, env=ENVIRONMENT, text=True, **options)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/runs/a"), "/runs/a: the disk is full; free some space"),
        (PermissionError(errno.EACCES, "Permission denied", "/runs/a"), "/runs/a: permission denied; change"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a.txt"), "a.txt: No such file; check the path"),
        (MemoryError("Unable to allocate 7 GiB"), "out of memory (Unable to allocate 7 GiB); use a smaller batch"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory ([Errno 12] Cannot allocate memory); use a"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory (DefaultCPUAllocator: can't"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of it.\nTried"), "out of memory (CUDA out of it.);"),
    ],
)
def test_a_fault_of_the_system_is_described_with_the_next_step(error: Exception, message: str) -> None:
    @command
    def main(argv=None):
        raise error

    with pytest.raises(AlmaError) as raised:
        main([])
    assert str(raised.value).startswith(message)
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("print('short')", "the disk is full"),
        ("print('x' * 100_000)", "the disk is full"),
        ("print('short'); raise AlmaError('the file is damaged')", "the file is damaged\n"),
        ("r, w = os.pipe(); os.close(r); os.write(w, b'task')", "Broken pipe"),  # to a worker
    ],
)
def test_a_full_disk_under_standard_output_and_a_broken_pipe_are_one_line_and_status_1(body: str, line: str) -> None:
    with open("/dev/full", "w") as full, start(body, stdout=full) as process:
        complaints = process.communicate(timeout=600)[1]
    assert process.returncode == 1 and complaints.count("\n") == 1 and line in complaints


@pytest.mark.parametrize("body", ["print('short')", "[print('x' * 1000) for _ in range(1000)]"])
def test_a_closed_pipe_ends_the_command_silently(body: str) -> None:
    process = start(f"sys.stdin.read(); {body}", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == "" and process.wait(timeout=600) == 0


def test_no_file_gets_the_number_of_a_closed_standard_stream() -> None:
    process = start("return os.open('/dev/null', os.O_RDONLY)", preexec_fn=lambda: os.closerange(0, 3))
    assert process.communicate(timeout=600) == (None, "") and process.returncode >= 3


@pytest.mark.parametrize(
    ("number", "line"), [(signal.SIGINT, "interrupted; run the same"), (signal.SIGTERM, "ended by SIGTERM; run")]
)
def test_a_signal_cleans_up_and_exits_with_one_line_and_128_plus_its_number(number: signal.Signals, line: str) -> None:
    body = f"try:\n        print('ready', flush=True)\n        {HANG}\n    finally:\n        print('tidy', flush=True)"
    process = start(body, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, complaints = process.communicate(timeout=600)
    assert (process.returncode, out) == (128 + number, "tidy\n")
    assert complaints.count("\n") == 1 and complaints.startswith(line)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_a_library_turns_into_an_error_is_still_a_signal(number: signal.Signals, capsys) -> None:
    @command
    def main(argv=None):
        try:
            signal.raise_signal(number)
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")

    assert main([]) == 128 + number
    assert capsys.readouterr().err.count("\n") == 1
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_defect_of_this_package_is_a_traceback() -> None:
    @command
    def main(argv=None):
        raise RuntimeError("an index is wrong")

    with pytest.raises(RuntimeError, match="an index"):
        main([])


def test_a_usage_error_is_short_and_has_no_control_characters(capsys) -> None:
    parser = Parser(prog="alma-x", formatter_class=argparse.HelpFormatter)
    with pytest.raises(SystemExit) as raised:
        parser.parse_args(["--\x1b[31m" + "x" * 10_000])
    assert raised.value.code == 2
    complaints = capsys.readouterr().err
    assert "\x1b" not in complaints and r"\x1b[31m" in complaints and len(complaints) < 3000


def test_a_terminal_that_cannot_show_a_character_gets_an_escape(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert command(lambda argv: print("…"))([]) == 0 and sys.stdout.buffer.getvalue() == b"\\u2026\n"


def test_unreadable_and_unwritable_paths_are_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AlmaError, match=r"--path .*: expected a file, found a folder; give a checkpoint"):
        refuse_no_file(tmp_path, "--path", "give a checkpoint")
    with pytest.raises(AlmaError, match=r"--path /dev/null: expected a file, found a pipe or a device"):
        refuse_no_file(Path("/dev/null"), "--path", "give a checkpoint")
    with pytest.raises(AlmaError, match=r"--out .*file: expected a folder, found a file"):
        refuse_no_folder(tmp_path / "file", "--out")
    with pytest.raises(AlmaError, match=r"--out .*file/a/b: expected a folder at .*file, found a file"):
        refuse_no_folder(tmp_path / "file/a/b", "--out")
    refuse_no_file(tmp_path / "file", "--path", "")
    refuse_no_folder(tmp_path / "new/er", "--out")


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
