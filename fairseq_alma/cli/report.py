"""``alma-report``: write tables, figures and an HTML page about runs."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Sequence

from fairseq_alma.errors import AlmaError, printable, refuse_no_folder
from fairseq_alma.options import Options, operand, opt
from fairseq_alma.terminal import Parser, command, print_line

DESCRIPTION = """\
Print tables with the results of each run: test perplexity (text) or test error (images) after each mega-batch and over
the stream, cost and growth. Most tables average runs that differ only in the seed. --out also writes files and an HTML
page."""


@dataclass(frozen=True)
class ReportOptions(Options):
    """Options of ``alma-report``."""

    runs: Sequence[Path] = operand("run folder of alma-stream (--run)", "RUN", nargs="+")
    out: Optional[Path] = opt(
        None, "folder for index.html, tables (.md, .csv, .tex) and figures (.png, .pdf)", metavar="DIR"
    )
    mix: bool = opt(False, "allow runs on different streams in one table; only bits per byte are then comparable")


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run ``alma-report`` and return the exit status."""
    parser = Parser(ReportOptions, prog="alma-report", description=DESCRIPTION)
    arguments = ReportOptions.read(parser.parse_intermixed_args(argv))  # RUN --mix RUN
    if arguments.out is not None:
        refuse_no_folder(arguments.out, "--out")
    # These imports load pandas, which --help does not need.
    from fairseq_alma.report.read_run import RecordedRun, load_run
    from fairseq_alma.report.write_report import Report, require_comparable

    errors: list[AlmaError] = []
    runs: list[RecordedRun] = []
    for path in {path.resolve(): path for path in arguments.runs}.values():  # drops repeated runs
        try:
            run = load_run(path, errors.append)
            require_comparable(run, runs[0] if runs else run, arguments.mix)
            runs.append(run)
        except AlmaError as fault:
            errors.append(fault)
    for error in errors:
        print_line(str(error), sys.stderr)
    if not runs:
        return 1
    report = Report(runs)
    for run in runs:
        if not any(run in group.runs for group in report.groups):
            print_line(f"note: {run.path}: left out, as another run has the same options and seed", sys.stderr)
    page = None if arguments.out is None else report.write(arguments.out)  # before the reader of the table exits
    for line in report.text().splitlines():
        print(printable(line))
    if page is not None:
        print(f"\nreport: {printable(str(page))}")
    return 1 if errors else 0
