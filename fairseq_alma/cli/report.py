"""``alma-report``: tables of perplexity per mega-batch, over any number of runs."""

import argparse
import sys
from pathlib import Path
from typing import Optional, Sequence

from fairseq_alma.cli.entry import command
from fairseq_alma.errors import AlmaError
from fairseq_alma.report.read_run import read_figures
from fairseq_alma.report.run_figures import RunFigures
from fairseq_alma.report.tables import all_tables


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        prog="alma-report",
        description="Print the test perplexity of runs after each mega-batch, with size and cost; where runs differ by "
        "their seeds alone, their mean; where models grew, the perplexity right before and after.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder that alma-stream wrote (--run)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the tables there: perplexity.md, .csv")
    parser.add_argument(
        "--mix", action="store_true", help="put runs on different streams into one table; bits per byte compare"
    )
    return parser


def _read_runs(paths: Sequence[Path]) -> tuple[list[RunFigures], int]:
    """Read the runs; name those that cannot be read, and count them."""
    runs, num_damaged = [], 0
    for path in paths:
        try:
            runs.append(read_figures(path))
        except AlmaError as error:
            print(error, file=sys.stderr)
            num_damaged += 1
    return runs, num_damaged


def _require_one_stream(runs: Sequence[RunFigures]) -> None:
    for run in runs[1:]:
        if run.stream["fingerprint"] != runs[0].stream["fingerprint"]:
            raise AlmaError(
                f"{run.path}: its stream ({_name_stream(run)}) is not that of {runs[0].path}"
                f" ({_name_stream(runs[0])}), "
                "so perplexities do not compare; report them apart, or give --mix"
            )


def _name_stream(run: RunFigures) -> str:
    return f"{run.stream['path']}, fingerprint {run.stream['fingerprint'][:12]}"


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    arguments = build_parser().parse_args(argv)
    runs, num_damaged = _read_runs(arguments.runs)
    if not runs:
        return 1
    if not arguments.mix:
        _require_one_stream(runs)
    tables = all_tables(runs)
    texts = {table.name: table.markdown() for table in tables}
    print("\n".join(texts.values()), end="")
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        for table in tables:
            (arguments.out / f"{table.name}.md").write_text(texts[table.name], encoding="utf-8")
            (arguments.out / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8")
    return 1 if num_damaged else 0
