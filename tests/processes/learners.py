"""Every learner of text through ``alma-stream --num-procs``: killed, resumed with other numbers of processes, compared.

    python -m tests.processes.learners                       # all learners, two processes: some minutes
    python -m tests.processes.learners --learner gmoe-split --procs 2 4 1

For each learner: a run of one process to its end; then one that begins with the first number of processes, loses one of
them in its first stage (SIGKILL), resumes with the next number, is killed as a whole in its last stage, and resumes
with the one after that (the first follows the last). Both must end with the same figures to the digits of a table, and
the same updates, tokens, parameters and experts; after each kill nothing may be left running.
"""

import argparse
import itertools
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

from tests.forked import is_alive, wait_until
from tests.kills.crashes import Crash
from tests.kills.launch import launch, prepare
from tests.kills.learners import COMMANDS, make_stream
from tests.runs.results import stage_records

# Two batches make an update, for two processes one each. Adam turns a gradient of nothing but rounding into a whole
# step unless its eps is large; dropout draws other masks in other processes.
SHARED = ["--batch-size", "4", "--update-freq", "4", "--dropout", "0", "--adam-eps", "1e-3"]
LEARNERS = [name for name in COMMANDS["text"] if name not in ("jobs", "procs")]
CLOSE = 2e-3
"""How far a loss may be off, relatively: rounding of sums in another order, carried through the updates."""
SECOND = r"/stage-{stage:03d}/member-\d+/checkpoint_\d+_4\.pt"
"""The second checkpoint of a stage: the first is whole then."""


def arguments_of(learner: str, stream: Path, run: Path, num_procs: int) -> list[str]:
    """Return those of ``alma-stream``."""
    options, words = COMMANDS["text"][learner]
    own = ["--stream", str(stream), "--run", str(run), "--save-every", "2", "--num-procs", str(num_procs)]
    return [*own, *options, "--", *words, *SHARED]


def lose(learner: str, stage: int, num_procs: int, of_all: bool, stream: Path, run: Path, log: Path) -> None:
    """Run until the second checkpoint of a stage, where one process of the training, or all, is killed."""
    crash = Crash(run, log.with_suffix(".journal"), 1, "kill" if of_all else "other", SECOND.format(stage=stage))
    log.unlink(missing_ok=True)
    status = launch(arguments_of(learner, stream, run, num_procs), log, crash)
    said = ["", *log.read_text().splitlines()][-1]
    assert status == (-signal.SIGKILL if of_all else 1), f"ended with {status}: {said}"
    assert of_all or "SIGKILL" in said, said
    processes = [int(each) for each in crash.left.read_text().split()]
    assert len(processes) == num_procs
    assert wait_until(lambda: not any(map(is_alive, processes))), "a process is left"


def differences(whole: list[dict[str, Any]], found: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what is not the same in two runs; losses may differ in their last digits."""
    if len(whole) != len(found):
        yield f"{len(found)} stages, not {len(whole)}"
    for one, other in zip(whole, found):  # noqa: B905 - said above
        for name in one.keys() - {"wall_seconds"}:
            for split, here, there in _pairs(one[name], other.get(name)):
                if here != there and not (split and abs(here - there) <= CLOSE * abs(here)):
                    yield f"stage {one['stage']}, {name} {split}: {there}, not {here}"


def _pairs(one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one:
            for name, here, there in _pairs(one[key], other.get(key)):
                yield f"{key} {name}".strip(), here, there
    else:
        yield "", one, other


def try_learner(learner: str, procs: Sequence[int], root: Path, stream: Path) -> str:
    """Carry out all that is said above for one learner; return what was found, in a line. Raises AssertionError."""
    number = itertools.cycle(procs)
    whole, run, log = root / f"{learner}-whole", root / f"{learner}-run", root / f"{learner}.log"
    no_crash = Crash(run, log.with_suffix(".journal"))
    assert launch(arguments_of(learner, stream, whole, 1), log, no_crash) == 0, log.read_text()
    for stage, of_all in ((0, False), (1, True)):
        num_procs = next(number)
        lose(learner, stage, num_procs, of_all or num_procs == 1, stream, run, log)
    assert launch(arguments_of(learner, stream, run, next(number)), log, no_crash) == 0, log.read_text()
    found = list(differences(stage_records(whole), stage_records(run)))
    assert not found, "; ".join(found)
    (*_, one), (*_, other) = stage_records(whole), stage_records(run)
    resumed = sum(map(len, (re.findall("Loaded checkpoint", path.read_text()) for path in run.glob("*/*.log"))))
    assert resumed >= 2, "nothing was resumed"
    return f"perplexity {one['test']['ppl']:.2f}, {other['test']['ppl']:.2f}"


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; the exit status is 1 if anything deviates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learner", nargs="+", choices=LEARNERS, default=LEARNERS, metavar="L")
    parser.add_argument(
        "--procs", nargs="+", type=int, default=[2, 2, 1], metavar="N", help="1, 2 or 4 (default: 2 2 1)"
    )
    arguments = parser.parse_args(argv)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        prepare(root / "options")
        stream = make_stream("text", root)
        for learner in arguments.learner:
            try:
                result = try_learner(learner, arguments.procs, root, stream)
            except AssertionError as error:
                failed += 1
                result = f"FAILED: {error}"
            print(f"{learner:<12} processes {', '.join(map(str, arguments.procs))}: {result}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
