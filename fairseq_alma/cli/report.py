"""``alma-report``: tables, figures, findings and one page, over any number of runs."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Sequence

from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.errors import AlmaError, printable, refuse_no_folder
from fairseq_alma.options import Options, operand, opt
from fairseq_alma.terminal import tell

if TYPE_CHECKING:
    from fairseq_alma.report.read_run import RunTable

REFRESH_SECONDS = 15


@dataclass(frozen=True)
class ReportOptions(Options):
    """What is reported of, and how."""

    runs: Sequence[Path] = operand("a folder that alma-stream wrote (--run)", "RUN", nargs="+")
    out: Optional[Path] = opt(
        None,
        "write there index.html, the tables (.md, .csv, .tex), findings.md and figures/ (.png, .pdf); those of an "
        "earlier report there that this one does not have are removed, by the list alma-report.json",
        metavar="DIR",
    )
    mix: bool = opt(False, "put runs on different streams into one table; bits per byte compare")
    paper: bool = opt(False, "set the paper's own numbers beside those of the runs (language)")
    watch: bool = opt(
        False, "with --out: write the report anew each time that a stage is complete, until all runs are (or Ctrl-C)"
    )


def build_parser() -> Parser:
    """Return the parser."""
    said = (
        "Print test perplexity or error of runs, text or images, finished or still going: after each "
        "mega-batch, over the whole stream, over seeds; what growth does, what learning sequentially costs, and which "
        "of the paper's findings these runs bear out. With --out, write all of it with figures and one page."
    )
    return Parser.of("alma-report", said, None, ReportOptions)


class _Faults:
    """Names what cannot be read, each fault once however often it is met, and counts those of the last reading."""

    def __init__(self) -> None:
        self.told: set[str] = set()
        self.num_now = 0

    def __call__(self, error: AlmaError) -> None:
        self.tell(str(error))
        self.num_now += 1

    def tell(self, line: str) -> None:
        """Print a line on standard error, once."""
        if line not in self.told:
            tell(line, sys.stderr)
        self.told.add(line)


def _read_runs(paths: Sequence[Path], faults: _Faults) -> "RunTable":
    """Read the runs, each once."""
    from fairseq_alma.report.read_run import RunTable, read_run

    runs = []
    faults.num_now = 0
    given: dict[Path, Path] = {}
    for path in paths:
        given.setdefault(path.resolve(), path)
    for path in given.values():
        try:
            runs.append(read_run(path, faults))
        except AlmaError as error:
            faults(error)
    return RunTable.of(runs)


def _on_one_stream(runs: "RunTable", faults: _Faults) -> "RunTable":
    """Keep the runs on the stream of the first one; name the others."""
    first, *others = runs.facts.itertuples()
    for run in others:
        if run.stream_key != first.stream_key:
            faults(
                AlmaError(
                    f"{run.path}: its stream ({_name_stream(run)}) is not that of {first.path} "
                    f"({_name_stream(first)}), so their figures do not compare; report it apart, or give --mix"
                )
            )
    return runs.where(runs.facts.stream_key == first.stream_key)


def _name_stream(run: Any) -> str:
    return f"{run.stream['path']}, fingerprint {run.stream['fingerprint'][:12]}"


def _report(arguments: ReportOptions, faults: _Faults) -> bool:
    """Read the runs, print and write what there is to say, and tell whether all of them are complete."""
    # Here, as --help needs none of it.
    from fairseq_alma.report.write_report import Report

    runs = _read_runs(arguments.runs, faults)
    if not len(runs.facts):
        return False
    chosen = runs if arguments.mix else _on_one_stream(runs, faults)
    report = Report(chosen, arguments.paper)
    if arguments.paper and not any(table.name.startswith("paper") for table in report.tables):
        faults.tell(
            "--paper: ignored for the tables, as none of these runs is a row of the paper's Tables 1 and 2, which are "
            "of text (SM, Ens, gEns and gMoE that copies, with waiting 1, 3 or 4)"
        )
    if not arguments.watch:
        print(report.text(), end="")
    are_complete = len(runs.facts) == len({path.resolve() for path in arguments.runs}) and runs.facts.is_complete.all()
    if arguments.out is not None:
        page = report.write(arguments.out, REFRESH_SECONDS if arguments.watch and not are_complete else None)
        stages = f"{chosen.facts.num_done.sum():,} of {chosen.facts.num_planned.sum():,} stages"
        shown = printable(str(page))
        print(f"written: {shown}, {stages}" if arguments.watch else f"\nwritten: {shown}", flush=True)
    return bool(are_complete)


def _watch(arguments: ReportOptions, faults: _Faults) -> None:
    """Report anew whenever a run has got further, until all are complete."""
    from fairseq_alma.report.write_report import changes

    for _ in changes(arguments.runs):
        if _report(arguments, faults):
            return


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    parser = build_parser()
    arguments = ReportOptions.read(parser.parse_intermixed_args(argv))  # RUN --paper RUN
    if arguments.watch and arguments.out is None:
        parser.error("--watch: needs --out DIR, the folder that is written anew")
    if arguments.out is not None:
        refuse_no_folder(arguments.out, "--out")
    faults = _Faults()
    if arguments.watch:
        _watch(arguments, faults)
    else:
        _report(arguments, faults)
    return 1 if faults.num_now else 0
