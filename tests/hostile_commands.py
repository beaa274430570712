# ruff: noqa: SIM905  command lines are read as a shell has them
"""Tries what the outside world can do to the commands: names, locales, streams, rights, memory, signals, numbers.

    python tests/hostile_commands.py [KIND...]          # 40 minutes on two cores; see docs/robustness.md

Each command runs as a shell runs it. What ends in a traceback, hangs, or lets an escape sequence through is a
deviation; the script names it and ends with status 1.
"""

import argparse
import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence

MODULES = {
    "alma-prep-text": "data_prep.text.command",
    "alma-prep-images": "data_prep.images.command",
    "alma-grow": "fairseq_alma.cli.grow",
    "alma-ensemble": "fairseq_alma.cli.ensemble",
    "alma-stream": "fairseq_alma.cli.stream",
    "alma-report": "fairseq_alma.cli.report",
}
START = "import sys; from fairseq_alma.cli import start; sys.exit(start.start(sys.argv.pop(1)))"
STOCK = (
    "import sys; from fairseq_cli import train, eval_lm; main = {'train': train, 'eval_lm': eval_lm}[sys.argv.pop(1)]; "
    "main.cli_main()"
)
SIZES = ("--decoder-layers 2 --decoder-embed-dim 16 --decoder-attention-heads 2 --decoder-ffn-embed-dim 16 "
         "--num-experts 2").split()  # fmt: skip
TEXT = ["--arch", "alma_switch_lm_tiny", *SIZES, "--criterion", "alma_switch_cross_entropy", "--cpu"]
TEXT += "--optimizer adam --lr 0.002 --max-update 4 --batch-size 4 --tokens-per-sample 32 --num-workers 0".split()
ESCAPE, LATIN, WIDE = "\x1b[31mred\x1b]0;t\x07", os.fsdecode(b"caf\xe9\xff"), "é→"
HUGE = "1" + "0" * 30
WITHOUT_ROOTS_RIGHTS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
WITHOUT_ROOTS_RIGHTS += ["--inh-caps=-dac_override,-dac_read_search"]

Trial = tuple[str, list[str], Mapping[str, Any]]


def command(name: str, *words: str, stock: bool = False) -> list[str]:
    """The words of a process: a command here, a module of data_prep, or one of fairseq's."""
    if stock:
        return [sys.executable, "-c", STOCK, name, *words]
    if name in MODULES:
        return [sys.executable, "-c", START, MODULES[name], *words]
    return [sys.executable, "-m", name, *words]


def attempt(
    words: Sequence[str], *, after: Optional[float] = None, environment: Mapping[str, str] = {}, **how: Any
) -> str:
    """Run a process and return what is wrong with how it ended; empty: nothing.

    Args:
        words: its command line.
        after: seconds until it gets Ctrl-C; None: never.
        environment: variables beside those of this process.
        how: options of ``Popen``.
    """
    how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    process = subprocess.Popen(words, env={**os.environ, **environment}, start_new_session=True, **how)
    try:
        if after is not None:
            time.sleep(after)
            process.send_signal(signal.SIGINT)
        out, said = (text or b"" for text in process.communicate(timeout=90))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "hangs"
    faults = [mark for mark in ("Traceback", "Exception ignored", "\x1b") if mark.encode() in out + said]
    lines = said.decode(errors="replace").strip().splitlines()
    return f"{faults!r} status {process.returncode}: {lines[-1] if lines else ''}" if faults else ""


def make_inputs() -> None:
    """Make a text, a stream of text, a stream of images and a run on each, in the working folder."""
    words = ["".join(random.choices("abcdefghij", k=random.randint(2, 6))) for _ in range(200)]
    Path("t.txt").write_text("\n\n".join(" ".join(random.choices(words, k=40)) for _ in range(400)))
    for made in (
        command("alma-prep-text", "t.txt", *"--out S --megabatches 2 --vocab-size 300".split()),
        command("alma-prep-images", *"digits --out I --megabatches 4".split()),
        command("alma-stream", *"--stream S --run R --".split(), *TEXT),
    ):
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    shutil.copy("R/stage-001/member-0/checkpoint_last.pt", "c.pt")
    for name in (ESCAPE, LATIN, WIDE):
        shutil.copytree("R", name)
        shutil.copytree("S", f"S{name}")
        shutil.copy("t.txt", f"{name}.txt")
    os.mkfifo("fifo")


WORK: dict[str, list[str]] = {
    "alma-prep-text": "t.txt --out o --megabatches 2 --vocab-size 300".split(),
    "alma-prep-images": "digits --out o --megabatches 2".split(),
    "alma-report": "R --out rep".split(),
    "alma-stream": "--stream I --run x -- --width 8 --max-epoch 2".split(),
    "alma-ensemble": "c.pt c.pt --out e.pt --force".split(),
    "alma-grow": "--path c.pt --out g.pt --method copy --select random --experts 1 --force".split(),
    "data_prep.corpus": ["kjv", "--text", "k.txt"],
}
RUN_TEXT = ["--", *TEXT]


def names_and_locales() -> Iterator[Trial]:
    """Names that are not UTF-8, steer terminals or go beyond ASCII, in five locales."""
    locales: list[dict[str, str]] = [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C"},
        {},
    ]
    locales.append({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    for environment in locales:
        for name in (ESCAPE, LATIN, WIDE):
            for words in (
                ["alma-prep-text", f"{name}.txt", "--out", "o", "--megabatches", "2", "--vocab-size", "300"],
                ["alma-prep-text", "t.txt", "--out", f"o{name}", "--megabatches", "2", "--vocab-size", "300"],
                ["alma-prep-text", f"{name}missing", "--out", "o", "--megabatches", "2"],
                ["alma-prep-text", "t.txt", "--out", "o", "--megabatches", name],
                ["alma-prep-text", "t.txt", "--out", "o", "--megabatches", "2", name, f"--un{name}"],
                ["alma-prep-images", "digits", "--out", f"o{name}", "--megabatches", "2"],
                ["alma-prep-images", "mnist", "--source", f"x{name}", "--out", "o", "--megabatches", "2"],
                ["alma-report", name],
                ["alma-report", "R", "--out", f"rep{name}"],
                ["alma-report", f"{name}x"],
                ["alma-stream", "--stream", f"S{name}", "--run", f"x{name}", "--dry-run", *RUN_TEXT],
                ["alma-stream", "--stream", "S", "--run", "x", "--dry-run", *RUN_TEXT, f"--{name}", name],
                ["alma-stream", "--stream", "S", "--run", name, *RUN_TEXT],
                ["alma-stream", "--stream", f"Sx{name}", "--run", "x", *RUN_TEXT],
                ["alma-grow", "--path", f"q{name}", "--out", "g.pt", "--method", name, "--experts", "1"],
                ["alma-ensemble", f"q{name}", "--out", f"e{name}"],
                ["data_prep.corpus", "kjv", "--text", f"k{name}"],
                ["data_prep.corpus", "wikitext-2", "--source", f"w{name}", "--out", "o"],
            ):
                yield f"{words[0]} {words[1:]!a} {environment}", command(*words), {"environment": environment}


def standard_streams() -> Iterator[Trial]:
    """Standard streams that are closed from the begin, or full."""
    for name, words in WORK.items():
        for closed in ((0,), (1,), (2,), (0, 1, 2)):
            yield f"{name}, closed {closed}", command(name, *words), {"preexec_fn": _closing(closed)}
        for full in (("stdout",), ("stderr",), ("stdout", "stderr")):
            for typed in (words, ["--help"], ["--nonsense"]):
                streams = {stream: open("/dev/full", "w") for stream in full}  # noqa: SIM115  for the process
                yield f"{name} {typed[:1]}, full {full}", command(name, *typed), streams


def _closing(numbers: Sequence[int]) -> Callable[[], None]:
    return lambda: [os.close(number) for number in numbers] and None


def no_files() -> Iterator[Trial]:
    """Pipes, devices, files and folders in the place of one another."""
    for path in (
        "fifo",
        "/dev/full",
        "/dev/null",
        "/dev/zero",
        "/dev/stdin",
        "t.txt",
        "t.txt/x",
        "/proc/self/mem",
        "S",
    ):
        for words in (
            ["alma-report", path],
            ["alma-report", "R", "--out", path if path != "S" else "S/stream.json"],
            ["alma-stream", "--stream", path if path != "S" else "R", "--run", "x", *RUN_TEXT],
            ["alma-stream", "--stream", "S", "--run", path, *RUN_TEXT],
            ["alma-prep-text", "t.txt", "--out", path, "--megabatches", "2"],
            ["alma-prep-text", "t.txt", "--out", "o", "--megabatches", "2", "--tokenizer", path],
            ["alma-prep-images", "digits", "--out", path, "--megabatches", "2"],
            ["alma-prep-images", "mnist", "--source", path, "--out", "o", "--megabatches", "2"],
            ["alma-prep-images", "arrays", "--images", path, "--labels", path, "--out", "o", "--megabatches", "2"],
            ["alma-grow", "--path", path, *WORK["alma-grow"][2:]],
            ["alma-grow", "--path", "c.pt", "--out", path, *WORK["alma-grow"][4:-1]],
            ["alma-grow", "--path", "c.pt", *"--out g.pt --force --method copy --experts 1 --stream".split(), path],
            ["alma-ensemble", path, "c.pt", "--out", "e.pt", "--force"],
            ["alma-ensemble", "c.pt", "--out", path],
            ["data_prep.corpus", "wikitext-2", "--source", path, "--out", "o"],
        ):
            yield " ".join(words[:9]), command(*words), {}


def missing_rights() -> Iterator[Trial]:
    """Files and folders that may not be read, entered or written."""
    prefix = WITHOUT_ROOTS_RIGHTS if os.geteuid() == 0 else []
    shutil.rmtree("p", ignore_errors=True)
    for folder in ("S", "R", "I"):
        shutil.copytree(folder, f"p/{folder}")
    for name in ("t.txt", "c.pt"):
        shutil.copy(name, "p")
    os.mkdir("p/ro")
    new_text, new_images = ["--run", "p/new", *RUN_TEXT], ["--run", "p/new", "--", "--max-epoch", "1"]
    trials: list[tuple[str, int, list[str]]] = [
        ("p/t.txt", 0, ["alma-prep-text", "p/t.txt", "--out", "o", "--megabatches", "2"]),
        ("p/ro", 0o300, ["alma-prep-text", "p/ro", "--out", "o", "--megabatches", "2"]),
        ("p/ro", 0o500, ["alma-prep-text", "t.txt", "--out", "p/ro/a/o", "--megabatches", "2"]),
        ("p/S", 0o500, ["alma-prep-text", "t.txt", "--out", "p/S", "--megabatches", "1", "--append"]),
        ("p/S/tokenizer/tokenizer.json", 0, ["alma-prep-text", "t.txt", "--out", "o", "--megabatches", "2",
                                             "--tokenizer", "p/S/tokenizer/tokenizer.json"]),
        ("p/ro", 0, ["alma-prep-images", "mnist", "--source", "p/ro", "--out", "o", "--megabatches", "2"]),
        ("p/ro", 0o500, ["alma-prep-images", "digits", "--out", "p/ro/o", "--megabatches", "2"]),
        *((f"p/S/{file}", 0, ["alma-stream", "--stream", "p/S", "--stage", "0", *new_text])
          for file in ("stream.json", "dict.txt", "test.bin", "megabatch-000/train.idx", "")),
        *((f"p/I/{file}", 0, ["alma-stream", "--stream", "p/I", *new_images])
          for file in ("stream.json", "images.npy", "megabatch-000/train.npy")),
        ("p/ro", 0o500, ["alma-stream", "--stream", "S", "--run", "p/ro/new", *RUN_TEXT]),
        *((f"p/R/{file}", 0, ["alma-stream", "--stream", "S", "--run", "p/R", *RUN_TEXT])
          for file in ("run.json", "stage-000/stage.json", "")),
        *((f"p/R/{file}", 0, ["alma-report", "p/R"]) for file in ("run.json", "stage-000", "stage-000/stage.json", "")),
        ("p/ro", 0o500, ["alma-report", "R", "--out", "p/ro/x"]),
        ("p/c.pt", 0, ["alma-grow", "--path", "p/c.pt", *WORK["alma-grow"][2:]]),
        ("p/ro", 0o500, ["alma-grow", "--path", "c.pt", "--out", "p/ro/g.pt", *WORK["alma-grow"][4:]]),
        ("p/c.pt", 0, ["alma-ensemble", "p/c.pt", "--out", "e.pt", "--force"]),
        ("p/ro", 0o500, ["data_prep.corpus", "kjv", "--text", "p/ro/k.txt"]),
    ]  # fmt: skip
    for path, mode, words in trials:
        before = os.stat(path).st_mode
        os.chmod(path, mode)
        yield f"{mode:o} {path}: {' '.join(words[:6])}", [*prefix, *command(*words)], {}
        os.chmod(path, before)
        shutil.rmtree("p/new", ignore_errors=True)


def little_memory() -> Iterator[Trial]:
    """Less memory than a command needs, from its first import on."""
    for name, words in WORK.items():
        for mebibytes in (60, 150, 200, 300, 800, 1500):
            limit = (mebibytes << 20, mebibytes << 20)
            how = {"preexec_fn": lambda limit=limit: resource.setrlimit(resource.RLIMIT_AS, limit)}
            yield f"{name}, {mebibytes} MiB", command(name, *words), how


def interruptions() -> Iterator[Trial]:
    """Ctrl-C at random moments, from just after Python itself has begun."""
    for name, words in WORK.items():
        for number in range(12):
            after = 0.1 + random.random() * (number + 1) * (1.0 if name in ("alma-grow", "alma-stream") else 0.3)
            yield f"{name}, Ctrl-C after {after:.2f} s", command(name, *words), {"after": after}


def numbers() -> Iterator[Trial]:
    """Numbers that fairseq's commands accept by themselves."""
    counts = ("-1", "0", HUGE)
    amounts = ("-1", "nan", "inf")
    of_counts = (
        "max-epoch batch-size max-tokens tokens-per-sample num-experts decoder-layers seed wait log-interval "
        "decoder-embed-dim decoder-attention-heads update-freq save-interval num-workers"
    )
    of_amounts = "dropout capacity-factor eval-capacity-factor balance-loss-weight lr clip-norm weight-decay adam-eps"
    options = {**dict.fromkeys(of_counts.split(), counts), **dict.fromkeys(of_amounts.split(), amounts)}
    options.update({"sample-break-mode": ("eos", "complete"), "moe-freq": ("-1",)})
    package = str(Path(__file__).resolve().parent.parent / "fairseq_alma")
    base = ["S", "--user-dir", package, "--task", "alma_lm", "--megabatch", "0", *TEXT, "--no-save"]
    ours = ["--stream", "S", "--run", "x", *RUN_TEXT]
    for option, values in options.items():
        for value in values:
            words = [f"--{option}", value]
            yield f"fairseq-train {words}", command("train", *base, *words, stock=True), {}
            yield f"alma-stream -- {words}", command("alma-stream", *ours, *words), {}
    for words in (["--noise", "inf"], ["--noise", "nan"], ["--noise", "-1"], ["--tokens-per-sample", "0"],
                  ["--experts", "0"], ["--experts", HUGE], ["--seed", HUGE], ["--batch-size", "0"]):  # fmt: skip
        yield f"alma-grow {words}", command("alma-grow", *WORK["alma-grow"], *words), {}
    for words in (["--wait", HUGE], ["--save-every", HUGE], ["--megabatches", HUGE], ["--iid", HUGE], ["--seed", HUGE],
                  ["--learner", "ens", "--num-members", HUGE], ["--stage", HUGE], ["--member", HUGE]):  # fmt: skip
        yield f"alma-stream {words}", command("alma-stream", *words, *ours), {}


KINDS: dict[str, Callable[[], Iterator[Trial]]] = {
    "names": names_and_locales,
    "streams": standard_streams,
    "files": no_files,
    "rights": missing_rights,
    "memory": little_memory,
    "interruptions": interruptions,
    "numbers": numbers,
}


def main() -> int:
    """Try all kinds, or those that are named; print how many of each, and what deviates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"from {', '.join(KINDS)} (default: all)")
    chosen = parser.parse_args().kinds or [*KINDS]
    random.seed(1)
    num_deviations = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        make_inputs()
        for kind in chosen:
            num_tried = 0
            for label, words, how in KINDS[kind]():
                for left in ("o", "x", "rep"):
                    shutil.rmtree(left, ignore_errors=True)
                fault = attempt(words, **how)
                num_tried += 1
                num_deviations += bool(fault)
                if fault:
                    print(f"  {kind}: {label}: {fault}", flush=True)
            print(f"{kind}: {num_tried} tried", flush=True)
    print(f"{num_deviations} deviations")
    return 1 if num_deviations else 0


if __name__ == "__main__":
    sys.exit(main())
