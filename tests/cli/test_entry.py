"""Faults of the outside world end a command in one line and an exit status, never in a traceback.

The commands run in processes of their own: what counts is what a shell sees.
"""

import argparse
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.errors import AlmaError, describe_os_error, refuse_no_file, refuse_no_folder
from fairseq_alma.options import utf8_path

IMPORTS = (
    "import os, sys, time\nfrom fairseq_alma.cli.entry import command\nfrom fairseq_alma.errors import AlmaError\n"
)
HEAD = f"{IMPORTS}@command\ndef main(argv=None):\n"
TAIL = "\nsys.exit(main())"
HANG = "while True: time.sleep(0.1)"  # a signal right before a sleep is answered after it

# as in a user's shell: with a buffer, in which a short output waits until the command ends
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def as_command(body: str) -> list[str]:
    """A process that runs the body as a command's ``main``."""
    return [sys.executable, "-c", f"{HEAD}    {body}{TAIL}"]


def run_command(body: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(as_command(body), stderr=subprocess.PIPE, env=ENVIRONMENT, text=True, timeout=600, **options)


def test_status_and_arguments_pass_through_unchanged() -> None:
    seen = []

    @command
    def main(argv=None):
        seen.append(argv)
        return 3

    assert main(["--wait", "2"]) == 3
    assert seen == [["--wait", "2"]]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/runs/a"), "/runs/a: the disk is full; free some space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/runs/a"), "/runs/a: the disk is full; free some space"),
        (PermissionError(errno.EACCES, "Permission denied", "/runs/a"), "/runs/a: permission denied; choose a folder"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "a.txt"),
            "a.txt: No such file or directory; che",
        ),
        (MemoryError(), "out of memory; give smaller sizes or fewer processes"),
        (MemoryError("Unable to allocate 7 GiB"), "out of memory: Unable to allocate 7 GiB; give smaller sizes"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory: DefaultCPUAllocator: can't"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of it.\nTried"), "out of memory: CUDA out of it.;"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory: [Errno 12] Cannot allocate memory"),
        (ImportError("x.so: failed to map segment from shared object"), "out of memory: x.so: failed"),
        (SystemError("error return without exception set"), "out of memory: error return without exception set;"),
        (UnicodeEncodeError("utf-8", "a/caf\udce9", 5, 6, "surrogates not allowed"), "a/caf\\udce9: not UTF-8"),
    ],
)
def test_a_fault_of_the_outside_world_names_what_it_is_about_and_the_next_step(error: Exception, message: str) -> None:
    @command
    def main(argv=None):
        raise error

    with pytest.raises(AlmaError) as raised:
        main([])
    assert str(raised.value).startswith(message)
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("print('short')", "the disk is full"),
        ("print('x' * 100_000)", "the disk is full"),
        ("print('short')\n    raise AlmaError('the file is damaged')", "the file is damaged\n"),
    ],
)
def test_a_full_disk_under_standard_output_is_one_line_and_status_1(body: str, said: str) -> None:
    with open("/dev/full", "w") as full:
        ended = run_command(body, stdout=full)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1 and said in ended.stderr


@pytest.mark.parametrize("body", ["print('short')", "[print('x' * 1000) for _ in range(1000)]"])
def test_a_reader_that_has_gone_ends_the_command_silently(body: str) -> None:
    process = subprocess.Popen(
        as_command(f"sys.stdin.read(); {body}"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=600) == 0


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_stream_that_is_closed_from_the_begin_is_done_without(number: int, tmp_path: Path) -> None:
    body = f"file = open({str(tmp_path / 'a')!r}, 'w'); print('text'); print('text', file=sys.stderr); file.close()"
    ended = run_command(body, stdout=subprocess.PIPE, preexec_fn=lambda: os.close(number))
    assert ended.returncode == 0
    assert ended.stdout + ended.stderr == "text\n" * (2 if number == 0 else 1)
    assert (tmp_path / "a").read_text() == ""


def test_a_worker_process_that_has_gone_is_not_taken_for_a_reader() -> None:
    ended = run_command("r, w = os.pipe(); os.close(r); os.write(w, b'task')", stdout=subprocess.PIPE)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "Broken pipe" in ended.stderr


def test_an_interruption_is_one_line_and_status_130() -> None:
    process = subprocess.Popen(
        as_command(f"print('ready', flush=True)\n    {HANG}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=600)
    assert process.returncode == 130
    assert complaints == "interrupted; nothing half-written is left, and the same command resumes or starts over\n"


def test_an_interruption_that_a_library_makes_an_error_of_is_one(capsys) -> None:
    @command
    def main(argv=None):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ImportError("initialization failed") from error

    assert main([]) == 130
    assert capsys.readouterr().err.startswith("interrupted; ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_a_library_makes_an_error_of_ends_as_one(number: signal.Signals, capsys) -> None:
    """torch does, which cannot end the archive that it was writing."""

    @command
    def main(argv=None):
        try:
            signal.raise_signal(number)
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")

    assert main([]) == 128 + number
    complaints = capsys.readouterr().err
    assert complaints.startswith(f"{number.name}: ended; ") and complaints.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_tidies_up_and_gives_status_128_and_its_number(number: signal.Signals) -> None:
    process = subprocess.Popen(
        as_command(
            f"try:\n        print('ready', flush=True)\n        {HANG}\n    finally:\n        print('tidy', flush=True)"
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, complaints = process.communicate(timeout=600)
    assert (process.returncode, out) == (128 + number, "tidy\n")
    assert complaints.count("\n") == 1
    assert complaints.startswith(f"{number.name}: ended; nothing half-written is left")


def test_signals_are_the_callers_again_after_a_command() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        seen = []

        @command
        def main(argv=None):
            seen.extend(signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP))

        main([])
        assert seen[0] is not signal.SIG_DFL
        assert seen[1] is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_defect_of_ours_stays_what_it_is() -> None:
    @command
    def main(argv=None):
        raise RuntimeError("an index is wrong")

    with pytest.raises(RuntimeError, match="an index"):
        main([])


@pytest.fixture
def as_somebody_else(monkeypatch):
    """Who may do what its owner may do: permissions do not hold for root, whom tests may run as."""
    rights = {os.R_OK: 0o400, os.W_OK: 0o200, os.X_OK: 0o100, os.W_OK | os.X_OK: 0o300}

    def access(path, right, effective_ids=False):
        return os.stat(path).st_mode & rights[right] == rights[right]

    monkeypatch.setattr("fairseq_alma.errors.os.access", access)


@pytest.mark.parametrize(
    ("made", "mode", "name", "said"),
    [
        ("a.txt", 0o000, "a.txt", "a.txt: permission denied; make it readable"),
        ("folder/", 0o300, "folder", "folder: permission denied; make it readable"),
        ("folder/", 0o600, "folder/a.txt", "/folder may not be entered; make it so"),
        ("folder/", 0o500, "folder/a.txt", "a.txt: permission denied; choose a folder that you may write to"),
        ("a.txt", 0o400, "a.txt", "a.txt: permission denied; choose a folder that you may write to"),
    ],
)
def test_a_missing_right_to_read_is_told_from_one_to_write(made, mode, name, said, tmp_path, as_somebody_else) -> None:
    path = tmp_path / made
    path.mkdir() if made.endswith("/") else path.write_text("")
    path.chmod(mode)
    assert said in describe_os_error(PermissionError(errno.EACCES, "Permission denied", str(tmp_path / name)))
    path.chmod(0o700)


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "C"}],
    ids=str,
)
def test_what_a_stream_cannot_spell_is_spelled_out(environment, monkeypatch) -> None:
    for name, value in environment.items():
        monkeypatch.setitem(ENVIRONMENT, name, value)
    ended = run_command(
        "print('caf\\u00e9 \\udce9')\n    raise AlmaError('\\u2192 \\udce9 \\x1b')", stdout=subprocess.PIPE
    )
    assert ended.returncode == 1
    assert "caf" in ended.stdout
    assert ended.stderr.count("\n") == 1
    assert "\\udce9 \\x1b" in ended.stderr


def test_a_usage_error_repeats_nothing_that_steers_a_terminal(capsys) -> None:
    with pytest.raises(SystemExit) as raised:
        Parser(prog="p").parse_args(["--\x1b[31m", "a\nb", "\udce9", "x" * 5000])
    assert raised.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == f"p: error: unrecognized arguments: --\\x1b[31m a\\nb \\udce9 {'x' * 100}…"


@pytest.mark.parametrize("text", ["caf\udce9", "\udcff/R"])
def test_a_path_that_records_must_hold_is_utf_8(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="found, a name in UTF-8 is needed"):
        utf8_path(text)
    assert utf8_path("é→") == Path("é→")


def test_a_path_that_an_ascii_locale_cannot_name_is_told_apart() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"a locale of ASCII cannot name; set LC_ALL=C\.UTF-8"):
        utf8_path(os.fsencode("é").decode("ascii", "surrogateescape"))


@pytest.mark.parametrize(("name", "found"), [("pipe", "a pipe or a device, no file"), ("folder", "a folder, no file")])
def test_what_is_no_file_is_refused_before_it_is_opened(name: str, found: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with pytest.raises(AlmaError, match=rf"^--path .*{name}: {found}; give a file$"):
        refuse_no_file(tmp_path / name, "--path", "give a file")
    refuse_no_file(tmp_path / "missing", "--path", "")


def test_a_folder_that_cannot_be_made_or_written_to_is_refused(tmp_path: Path, as_somebody_else) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "locked").mkdir(mode=0o500)
    os.mkfifo(tmp_path / "pipe")
    for name, said in (
        ("file", "file: a file; give the name of a folder"),
        ("pipe", "pipe: a file; give the name of a folder"),
        ("file/a/b", "file is no folder; give another path"),
        ("locked/a/b", "locked may not be written to; choose a folder that you may write to"),
        ("locked", "locked may not be written to"),
    ):
        with pytest.raises(AlmaError, match=rf"^--run .*{said}"):
            refuse_no_folder(tmp_path / name, "--run")
    refuse_no_folder(tmp_path / "new/folder", "--run")


@pytest.mark.slow
def test_users_see_warnings_of_fairseq_but_no_notes_to_developers() -> None:
    body = (
        "import logging, fairseq.tasks, fairscale.experimental.nn.offload\n"
        "    logging.getLogger('hydra.core.utils').debug('a job runtime is set')\n"
        "    logging.getLogger('fairseq.trainer').warning('the loss is not finite')"
    )
    finished = run_command(body)
    assert finished.returncode == 0
    assert finished.stderr.splitlines() == ["fairseq.trainer: the loss is not finite"]
