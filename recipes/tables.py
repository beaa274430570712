"""Rebuild the tables and verdicts of recipes/README.md from the runs' own records, which are kept beside them.

    python recipes/tables.py                            # all tables, as `make tables` does
    python recipes/tables.py --check                    # change nothing; exit status 1 if a figure is not the records'
    python recipes/tables.py --keep NAME RUN...         # keep the run.json and stage.json of these runs as table NAME
    python recipes/tables.py --incomplete --keep NAME RUN...     # also of those that have not ended
    python recipes/tables.py --add --keep NAME RUN...            # beside those that table NAME has already

``records/NAME.tar.xz`` holds the run.json and stage.json of a table's runs, as they were written, but for the path of
the stream, of which the last part is left. In PAGES everything between ``<!-- table NAME -->`` (or another of BLOCKS)
and ``<!-- end -->`` is written by this program. What `alma-report` finds in the runs of a block ``findings``, and
where, is in ``records/NAME.findings.md``. An interval in a sentence of SENTENCES (``1.2 ± 0.3``, ``0.9 [0.8, 1.1]``)
that is in no table is named.
"""

import argparse
import functools
import io
import json
import lzma
import re
import shlex
import sys
import tarfile
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, Callable, Collection, Iterable, Iterator, Mapping, Optional, Sequence

import arms
import ladder_tables

from fairseq_alma.cli.entry import command
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import open_atomically
from fairseq_alma.report.experiment import Experiment, experiments, names_of
from fairseq_alma.report.finding import Spread, difference, half_interval, is_close
from fairseq_alma.report.findings import all_findings
from fairseq_alma.report.read_run import RunTable, read_run, rows_of
from fairseq_alma.report.spelling import Table, render_markdown
from fairseq_alma.report.tables import MEASURES, all_tables, summary_table
from fairseq_alma.report.write_report import findings_markdown

HERE = Path(__file__).parent
README = HERE / "README.md"
PAGES = (README, HERE / "sensitivity.md", *(HERE / each / "README.md" for each in ("anytime", "lm/ladder", "growth")))
SENTENCES = (HERE / "lm/ladder/README.md", *(HERE.parent / page for page in ("README.md", "docs/how-to/anytime.md")))
RECORDS = HERE / "records"
ENDING = ".tar.xz"
CODE = "released code"
FIGURES = (("anytime", 1), ("final", 100))  # CER in percent points already, errors in percent
LEFT_OUT = ("hours", "test FLOPs/image", "test FLOPs/token")


def keep(name: str, runs: Iterable[Path], incomplete: bool = False, add: bool = False) -> Path:
    """Write the records of runs into an archive that depends on nothing but them. Returns it.

    Args:
        name: of the archive.
        runs: their folders.
        incomplete: also those that have not ended.
        add: beside the runs that the archive has, but for those that are given again.

    Raises:
        AlmaError: there are no runs to keep, two of them have one name, or one is damaged; no archive is touched.
    """
    records: dict[str, Path] = {}
    for root in sorted({path.resolve() for path in runs}):
        facts, _ = read_run(root)
        if not incomplete and not facts["is_complete"]:
            print(f"{root}: not complete, left out", file=sys.stderr)
            continue
        label = root.name if not root.name.startswith("seed-") else f"{root.parent.name}/{root.name}"
        if label in records:
            raise AlmaError(f"{root}: called {label}, as {records[label]} is; move one of them to another name")
        records[label] = root
    if not records:
        raise AlmaError(f"--keep {name}: no run to keep; give the folders of complete runs behind the name")
    archive = RECORDS / f"{name}{ENDING}"
    if archive.parent != RECORDS or not name.strip("."):
        raise AlmaError(f"--keep {name}: the name of a table is needed, not a path")
    contents = (
        {run.as_posix(): each for run, each in _read_archive(archive).items()} if add and archive.exists() else {}
    )
    contents |= {label: dict(_records_of(root)) for label, root in records.items()}
    with open_atomically(archive) as written, tarfile.open(fileobj=written, mode="w:xz", preset=9) as file:
        for label, each in sorted(contents.items()):
            for path, content in each.items():
                data = json.dumps(content).encode()
                entry = tarfile.TarInfo(f"{label}/{path}")
                entry.size = len(data)
                file.addfile(entry, io.BytesIO(data))
    return archive


def _records_of(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is kept of a run, by the path of its file: run.json, then its stages in order."""
    for path in [root / "run.json", *sorted(root.glob("stage-*/stage.json"))]:
        content = json.loads(path.read_text(encoding="utf-8"))
        if path.name == "run.json":
            content["stream"]["path"] = Path(content["stream"]["path"]).name
        yield path.relative_to(root).as_posix(), content


def read(name: str) -> RunTable:
    """Read the runs of a table from its archive. Raises AlmaError if that is damaged."""
    records = _read_archive(RECORDS / f"{name}{ENDING}")
    return RunTable.of(rows_of(label, *_run_and_stages(each)) for label, each in sorted(records.items()))


def _run_and_stages(records: Mapping[str, dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    run, *stages = records.values()
    return run, stages


def _read_archive(archive: Path) -> dict[Path, dict[str, dict[str, Any]]]:
    """Return the records of each run as they were kept, by their paths in it: run.json first, the stages in order."""
    records: dict[Path, dict[str, dict[str, Any]]] = {}
    try:
        with tarfile.open(archive) as file:
            for entry in file:
                path, content = Path(entry.name), file.extractfile(entry)
                assert content is not None
                run = path.parent if path.name == "run.json" else path.parent.parent
                records.setdefault(run, {})[path.relative_to(run).as_posix()] = json.load(content)
    except (EOFError, tarfile.TarError, lzma.LZMAError, ValueError) as error:
        raise AlmaError(f"{archive}: damaged, {error}; take it from git again, or --keep its runs anew") from error
    return records


def table_of(runs: RunTable) -> str:
    """Return the table over the stream, and how many runs are in it."""
    table = summary_table(experiments(runs), MEASURES[runs.facts.kind.iloc[0]])
    shown = [column for column in table.header if column not in LEFT_OUT]
    places = [table.header.index(column) for column in shown]
    rows = [[row[place] for place in places] for row in table.rows]
    complete = int(runs.facts.is_complete.sum())
    how_many = f"{'all ' * (complete > 1)}complete" if complete == len(runs.facts) else f"{complete} complete"
    num_runs = f"{len(runs.facts)} run{'s' * (len(runs.facts) != 1)}"
    return f"{render_markdown(shown, rows)}\n{num_runs}, {how_many}; their records are in `records/`.\n"


_findings_of = functools.cache(all_findings)  # a block of a page, and a page of their own


def verdicts_of(runs: RunTable) -> str:
    """Return a line for each finding on which the runs say something, by the settings of the runs."""
    lines = []
    for run, found in _findings_of(runs):
        told = [finding for finding in found if finding.is_told]
        preset, _, other = run.setting.partition(", ") if run.setting.startswith(CODE) else ("paper", "", run.setting)
        lines += ["", f"With the settings of the {preset}{f', but {other}' if other else ''}:", ""]
        lines += [f"- **{each.verdict.value}**: {each.claim} {each.decided_by}" for each in told]
        if len(told) < len(found):
            lines.append(f"- {len(found) - len(told)} more need other runs")
    return "\n".join(lines[1:]) + "\n"


def settings_of(runs: RunTable) -> str:
    """Return what each learner comes to in both settings, and the order of the learners that were run in both."""
    found: dict[tuple[str, int], dict[str, dict[str, Experiment]]] = {}
    for each in experiments(runs):
        run = each.first
        if len(each.complete) and not run.replay and run.setting in ("", CODE):
            found.setdefault((run.backbone, run.wait), {}).setdefault(run.variant, {})[run.setting] = each
    values, orders, gaps = [], [], []
    for (size, wait), learners in found.items():
        both = {name: pair for name, pair in learners.items() if len(pair) == 2}
        values += [[name, size, str(wait), *_compared(pair)] for name, pair in both.items()]
        if len(both) > 1:
            orders.append([size, str(wait), *(_order(both, setting) for setting in ("", CODE))])
        for name, pair in both.items() if "SM" in both else ():
            if name != "SM":
                cers = [(_spread(both["SM"][each], "anytime"), _spread(pair[each], "anytime")) for each in ("", CODE)]
                gaps.append([name, size, str(wait), *(_apart(single, other) for single, other in cers)])
    header = ["learner", "size", "wait", "CER, text", "CER, code", "code less text, 95 %", "final, text", "final, code"]
    parts = [(header, values), (["size", "wait", "order by CER, text", "order by CER, code"], orders)]
    parts.append((["learner", "size", "wait", "CER less that of SM, text", "CER less that of SM, code"], gaps))
    return "\n".join(render_markdown(head, rows) for head, rows in parts if rows)


def differences_of(runs: RunTable) -> str:
    """Return how far each two of the experiments are apart, over shared seeds, with 95 % intervals."""
    found = experiments(runs)[::-1]  # those with options first
    rows = []
    for (name, one), (other_name, other) in combinations(zip(names_of(found), found, strict=True), 2):
        cer, final = (_apart(_spread(other, which), _spread(one, which), scale) for which, scale in FIGURES)
        half = Spread.of({seed: value / 2 for seed, value in _spread(other, "final").by_seed.items()})
        assert half is not None
        rows.append([name, other_name, cer, final, _apart(half, _spread(one, "final"), 100)])
    header = ["", "less that of", "CER", "final error", "final error less half of that"]
    return render_markdown(header, rows)


def matrix_of(runs: RunTable) -> str:
    """Return the losses on slices of each mega-batch, of runs with ``--matrix`` that are called ARM-lrLR-seedN."""
    table = _named("matrix", runs)
    named = {each.note: arms.NAME.fullmatch(Path(each.first.path).name) for each in experiments(runs)}
    arm_of = {note: name["arm"] for note, name in named.items() if name is not None}
    cells = table.cells.drop(columns=["learner", "experts"]).rename(columns={"options": "arm"})
    shown = replace(table, cells=cells.assign(arm=cells.arm.map(arm_of)))
    return render_markdown(shown.header, shown.rows)


def report_of(runs: RunTable, name: str) -> str:
    """Return a table of alma-report by its name: ``seeds``, ``growth``, ``iid``, ``paper``, ..."""
    table = _named(name, runs)
    return render_markdown(table.header, table.rows)


def ladder_of(runs: RunTable, name: str) -> str:
    """Return a table of the ladder of sizes by its name: one of its ``TABLES``, or ``trend`` over all sizes."""
    if name == "trend":
        return ladder_tables.trend_table(ladder_tables.rungs_of())
    return ladder_tables.TABLES[name](ladder_tables.Rung.of(runs))


@functools.cache  # several blocks show tables of the same runs
def _tables_by_name(runs: RunTable) -> dict[str, Table]:
    return {table.name: table for table in all_tables(runs, paper=True)}


def _named(name: str, runs: RunTable) -> Table:
    found = _tables_by_name(runs)
    if name not in found:
        raise AlmaError(f"report {name}: alma-report has no such table of these runs; choose from {', '.join(found)}")
    return found[name]


def _apart(one: Spread, other: Spread, scale: float = 1) -> str:
    """Spell how far a figure is above another over shared seeds, with the half-width of its 95 % interval."""
    gap = difference(one, other)
    if gap is None:
        return "–"
    mean, half = scale * gap.mean, scale * half_interval(gap.deviation, gap.num_seeds)
    digits = 1 if max(abs(mean), half) >= 1 else 2
    return f"{mean:+,.{digits}f} ± {half:,.{digits}f}"


def _spread(experiment: Experiment, figure: str) -> Spread:
    spread = experiment.spread(figure)
    assert spread is not None  # of complete runs
    return spread


def _compared(pair: Mapping[str, Experiment]) -> list[str]:
    """Spell CER in both settings, the difference over shared seeds with its interval, and the final errors."""
    text, code = (_spread(pair[setting], "anytime") for setting in ("", CODE))
    ends = [_spread(pair[setting], "final").show(2, 100) for setting in ("", CODE)]
    return [text.show(1), code.show(1), _apart(text, code), *ends]


def _order(learners: Mapping[str, Mapping[str, Experiment]], setting: str) -> str:
    """Spell the learners from the lowest CER to the highest; ≈ stands between those too close to tell."""
    ranked = sorted(((_spread(pair[setting], "anytime"), name) for name, pair in learners.items()), key=_mean)
    text = ranked[0][1]
    for (one, _), (other, name) in pairwise(ranked):
        text += f" {'≈' if 1 in (one.num_seeds, other.num_seeds) or is_close(one, other) else '<'} {name}"
    return text


def _mean(ranked: tuple[Spread, str]) -> float:
    return ranked[0].mean


BLOCKS: dict[str, Callable[..., str]] = {
    "table": table_of, "findings": verdicts_of, "settings": settings_of, "differences": differences_of,
    "matrix": matrix_of, "report": report_of, "arms": arms.block, "ladder": ladder_of,
}  # fmt: skip
"""What a block is -> what writes it, given the runs and the options that stand behind their name."""
_BLOCK = re.compile(rf"(<!-- ({'|'.join(BLOCKS)}) (\S+)( [^\n]+)? -->\n).*?(<!-- end -->)", re.DOTALL)


def names() -> Iterator[str]:
    """Return the tables of which records are kept."""
    return (path.name.removesuffix(ENDING) for path in sorted(RECORDS.glob(f"*{ENDING}")))


def rebuilt(text: str, runs: Mapping[str, RunTable]) -> str:
    """Return a page with the blocks of some tables written anew."""

    def block(match: re.Match[str]) -> str:
        begin, what, name, options, end = match.groups()
        if name not in runs:
            return match[0]
        return begin + BLOCKS[what](runs[name], *shlex.split(options or "")) + end

    return _BLOCK.sub(block, text)


def everything(chosen: Iterable[str]) -> dict[Path, str]:
    """Return all pages, and the findings of some tables, as they are to be."""
    runs = {name: read(name) for name in chosen}
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    kept = {*names(), *runs}
    for page, text in texts.items():
        unknown = [name for _, _, name, *_ in _BLOCK.findall(text) if name not in kept]
        if unknown:
            raise AlmaError(f"{page}: a block {unknown[0]}, of which there are no records; --keep some, or correct it")
    pages = {page: rebuilt(text, runs) for page, text in texts.items()}
    told = {name for text in pages.values() for _, what, name, *_ in _BLOCK.findall(text) if what == "findings"}
    return pages | {
        RECORDS / f"{name}.findings.md": findings_markdown(_findings_of(each))
        for name, each in runs.items()
        if name in told
    }


_NUMBER = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?"
_INTERVAL = re.compile(rf"({_NUMBER})(?: %)? (?:± ({_NUMBER})|\[({_NUMBER}), ({_NUMBER})\])")


def known_intervals(pages: Iterable[str]) -> set[tuple[float, ...]]:
    """Return the numbers of each interval in the blocks of pages, without their signs, as shares and in percent."""
    blocks = "\n".join(match[0] for page in pages for match in _BLOCK.finditer(page))
    return {
        tuple(scale * abs(float(each)) for each in numbers) for _, numbers in _intervals(blocks) for scale in (1, 100)
    }


def unknown_intervals(text: str, known: Collection[Sequence[float]]) -> list[tuple[int, str]]:
    """Return the intervals in the sentences of a page, and in the last column of its other tables, that are not known.

    An interval of a sentence is a known one if it is so when rounded, whatever its sign ("4 ± 1 % behind").

    Args:
        text: of the page.
        known: their numbers, from `known_intervals`.

    Returns:
        The number of the line, from 1, and the interval as it is written.
    """
    own = _BLOCK.sub(lambda match: "\n" * match[0].count("\n"), text)
    found = []
    for number, line in enumerate(own.splitlines(), 1):
        for written, numbers in _intervals(line.rsplit("|", 2)[1] if line.startswith("|") else line):
            if not any(_is_rounded(numbers, each) for each in known):
                found.append((number, written))
    return found


def _intervals(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each interval as it is written, and its two or three numbers."""
    for match in _INTERVAL.finditer(text):
        yield match[0], tuple(each.replace(",", "") for each in match.groups() if each)


def _is_rounded(numbers: Sequence[str], known: Sequence[float]) -> bool:
    """Return whether numbers as they are written are known ones to as many decimals."""
    return len(numbers) == len(known) and all(
        abs(abs(float(each)) - exact) <= 0.5 / 10 ** len(each.partition(".")[2]) + 1e-9
        for each, exact in zip(numbers, known, strict=True)
    )


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if something would change")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these tables alone (default: all)")
    parser.add_argument("--keep", nargs="+", metavar=("NAME", "RUN"), help="keep the records of runs as table NAME")
    parser.add_argument("--incomplete", action="store_true", help="keep also those that have not ended")
    parser.add_argument("--add", action="store_true", help="keep them beside those that table NAME has already")
    args = parser.parse_args(argv)
    unknown = sorted({*(args.only or ())} - {*names(), *(args.keep or ())[:1]})
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: no such table; choose from {', '.join(names())}")
    if args.check and args.keep:
        parser.error("--check changes nothing; leave it or --keep out")
    for option in ("incomplete", "add"):
        if getattr(args, option) and not args.keep:
            parser.error(f"--{option} says which runs are kept; give --keep NAME RUN as well")
    if args.keep:
        archive = keep(args.keep[0], map(Path, args.keep[1:]), args.incomplete, args.add)
        print(f"{archive.relative_to(HERE)}: {archive.stat().st_size:,} bytes")
    wanted = everything(args.only or [*names()])
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not args.check:
            path.write_text(wanted[path], encoding="utf-8")
        print(f"{path.relative_to(HERE)}: {'is not that of the records' if args.check else 'written'}")
    known = known_intervals(wanted[page] for page in PAGES)
    unfounded = [
        f"{page.relative_to(HERE.parent)}:{number}: {interval} is in no table"
        for page in SENTENCES
        for number, interval in unknown_intervals(wanted.get(page) or page.read_text(encoding="utf-8"), known)
    ]
    for line in unfounded:
        print(line)
    return 1 if (stale or unfounded) and args.check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
