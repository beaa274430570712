"""``alma-update``: the monthly job. One folder holds stream, run, report and exported model; each call adds a month.

It calls ``alma-prep-text``, ``alma-stream``, ``alma-report`` and ``alma-export``. ``update.json`` has the options of
the first call and, for each month, the decision (`next_step`) and the tests after it. It is written before a month is
trained, after its training and at its end, so that the next call finishes a month that was killed.
"""

import contextlib
import itertools
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Iterator, Optional, Sequence

import msgspec
from msgspec import Struct

from data_prep.text.command import main as prep_text
from data_prep.text.documents import FilePart, Source, documents_of
from data_prep.text.options import FORMATS
from data_prep.text.source import find_sources
from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.cli.stream import main as stream_main
from fairseq_alma.data.stream import Stream, file_sha256, holdout_name
from fairseq_alma.data.tokens import StreamTokenizer
from fairseq_alma.errors import AlmaError
from fairseq_alma.exchange.exportable import ARCHITECTURE, refuse_model
from fairseq_alma.files import as_record, locked, read_json_object, require_version, synchronise, write_json_atomically
from fairseq_alma.metrics import bits_per_byte
from fairseq_alma.options import Options, operand, opt, real, utf8_path, utf8_word
from fairseq_alma.runs.run_folder import RunFolder, stage_predictor
from fairseq_alma.runs.study import read_size
from fairseq_alma.terminal import print_line
from fairseq_alma.text.defaults import num_params, row_of
from fairseq_alma.text.helper import call

RECORD, VERSION = "update.json", 2
STREAM, RUN, REPORT, EXPORT, LOG = "stream", "run", "report", "export", "update.log"
NEXT = "run.next"
"""The run that is trained next to the run that it will replace."""
SPLITS = ["--valid-bytes", "3%", "--test-bytes", "5%", "--holdout-bytes", "2%"]
"""Held-out shares of the first month; the last one holds for each month."""
BUDGET = 3.0
LEAST_PASSES = 1.0
"""Minimum number of passes through the new text, also where ``--size`` or ``--redo`` has spent the budget before."""
LEAST_RESTART = 1.5
"""Minimum number of passes through all text with which a larger model catches up with the model that it replaces."""
TOKENS_PER_PARAMETER = 8
"""With more tokens for each parameter, a model is too small for its text."""
AHEAD = 6
"""A new model is sized for this many times the text so far, because more text will follow (how-to/monthly.md)."""
LEAST_TOKENS = 2_600_000
"""A new model is at least of the size for a run of this many tokens (width 128), as more text follows a small month:
mean bits per byte after six months of novels were 1.960 with 1.15 million parameters and batch 2, 2.004 with 522
thousand and batch 4, 2.065 with the 320 thousand parameters and batch 8 that the first month alone gave."""
WORSE = 1.01
"""Ratio of bits per byte above which a warning reports that old text is predicted worse than before."""
LEAST_OF_USUAL = 0.7
"""Minimum bytes per token of a month, as a share of those of the first month."""
SAMPLED_DOCUMENTS = 200
EPILOG = """\
The first call writes MODEL/ with stream/, run/, report/ and export/. Each later call appends its text, trains on draws
from all text so far, tests the model, and writes report and export again. The same command resumes a killed call.
Options after -- are passed to fairseq-train; give them with the first call.

  alma-update model 2026-01.txt.xz
  alma-update model inbox/2026-03/
  alma-update model --redo --budget 6
"""


def next_step(parameters: int, tokens: Sequence[int], spent: float, budget: float = BUDGET) -> tuple[str, float]:
    """Decide whether the model continues, or a larger one begins.

    Args:
        parameters: size of the model; 0 if there is none.
        tokens: tokens of each month so far, the new one last.
        spent: tokens that all months before were trained on, each pass counted.
        budget: passes; all months together cost at most this number of passes through all text so far, unless
            ``--size`` or ``--redo`` asked for more.

    Returns:
        ``begin`` or ``restart`` with passes of a new model through all text, or ``continue`` with passes through the
        new text.
    """
    total = sum(tokens)
    affordable = (budget * total - spent) / total
    if not parameters:
        return "begin", budget
    if total > TOKENS_PER_PARAMETER * parameters and affordable >= LEAST_RESTART:
        return "restart", min(budget, affordable)
    return "continue", min(budget, max(LEAST_PASSES, (budget * total - spent) / tokens[-1]))


def new_size(tokens: float, vocab_size: int) -> int:
    """Return the number of parameters of a new model whose first training reads that many tokens, each pass counted."""
    row = row_of(max(LEAST_TOKENS, AHEAD * tokens))
    return num_params(row.width, row.layers, vocab_size)


@dataclass(frozen=True)
class UpdateOptions(Options):
    """Options of a call; those that describe the text hold for all months."""

    model: Path = operand("folder of the model; a new one is created", "MODEL", parse=utf8_path)
    inputs: Sequence[str] = operand("files or folders with the text of one month", "NEW_TEXT", nargs="*", parse=str)
    budget: float = opt(
        BUDGET,
        "maximum passes through the new text, and of all months through all text",
        range=real(0, 1000, above=True),
        metavar="R",
    )
    redo: bool = opt(False, "train the newest month again, for example with another --budget; takes no NEW_TEXT")
    size: Optional[int] = opt(
        None, "parameters, such as 800k; a later month then trains a new model (default: by the text)", parse=read_size
    )
    format: Optional[str] = opt(None, "format of the text of all months (default: auto)", choices=FORMATS)
    field: Optional[str] = opt(
        None, "name of the text field in all months (default: text)", parse=utf8_word, metavar="NAME"
    )
    another_language: bool = opt(False, "accept text in a language that the tokenizer was not trained on")


class Month(Struct, omit_defaults=True):
    """A month in ``update.json``. Its figures are bits per byte; None where nothing is held out."""

    step: tuple[str, float]  # see `next_step`
    first: int  # first month, from 0, of the run that has this month
    size: Optional[int] = None  # parameters of a new model; None: alma-stream decides
    replaces: bool = False  # a new run is trained, which then replaces the run
    before: Optional[float] = None  # on this month's held-out part, before its training
    months: list[Optional[float]] = []  # on the held-out part of each month so far, after its training
    test: Optional[float] = None  # on the first month's test set, after its training
    params: int = 0  # 0 until the month is trained
    train_tokens: int = 0  # includes trainings of this month that --redo replaced
    is_done: bool = False  # report and export are written


class UpdateRecord(Struct):
    """``update.json``."""

    version: int
    text: list[str]  # options of the first call for alma-prep-text
    words: list[str]  # options of the first call for fairseq-train
    months: list[Month]
    redo: Optional[Month] = None  # the newest month, while it is trained again

    def save(self, root: Path) -> None:
        """Write it to the folder of the model."""
        write_json_atomically(root / RECORD, msgspec.to_builtins(self))


def read_record(root: Path) -> UpdateRecord:
    """Read ``update.json``; return a record without months if the model is new. Raises AlmaError for other folders."""
    path, remedy = root / RECORD, "restore it from a backup, or give a new MODEL"
    if path.exists():
        content = read_json_object(path, remedy)
        require_version(content.get("version"), VERSION, path, "give a new MODEL and the texts of all months")
        return as_record(content, UpdateRecord, path, remedy)
    others = {each.name for each in root.iterdir() if not each.name.startswith(".")} if root.is_dir() else set()
    if root.is_file() or others - {STREAM, LOG}:
        raise AlmaError(f"{root}: no {RECORD} found, so it is no folder of alma-update; give a new folder as MODEL")
    return UpdateRecord(VERSION, [], [], [])


def build_parser() -> Parser:
    """Return the parser of the arguments before ``--``."""
    return Parser.of(
        "alma-update",
        "Train a language model on text, or update it with the text of one more month.",
        EPILOG,
        UpdateOptions,
        usage="alma-update MODEL [NEW_TEXT...] [options] [-- fairseq-train options]",
    )


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run ``alma-update``."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = build_parser()
    options = UpdateOptions.read(parser.parse_intermixed_args(words[:cut]))  # alma-update MODEL --size 1M NEW_TEXT
    if options.redo == bool(options.inputs):
        parser.error("--redo: trains the newest month again; give no NEW_TEXT" if options.redo else "NEW_TEXT: missing")
    root, is_new = options.model, not options.model.exists()
    read_record(root)  # a folder of another kind is refused before a lock is written into it
    try:
        with locked(root / ".lock", f"{root}", who="alma-update"):
            record = read_record(root)
            if options.redo:
                _redo(root, record, options)
            else:
                _add(root, record, options, words[cut + 1 :])
        return 0
    finally:
        if is_new and root.is_dir() and {each.name for each in root.iterdir()} <= {".lock", LOG}:
            shutil.rmtree(root)


def _add(root: Path, record: UpdateRecord, options: UpdateOptions, words: list[str]) -> None:
    """Add a month, or finish the newest one if it has this text."""
    text = [word for name in ("format", "field") if (value := getattr(options, name)) for word in (f"--{name}", value)]
    if not record.months:
        refuse_model("after the --: --arch", dict(itertools.pairwise(words)).get("--arch", ARCHITECTURE))
        record.text, record.words = text, words
    elif (text or words) and (text, words) != (record.text, record.words):
        first = " ".join([*record.text, "--", *record.words])
        raise AlmaError(f"{root / RECORD}: the first call had the options {first}; give these or none, or a new MODEL")
    how = dict(itertools.pairwise(record.text))
    form = None if how.get("--format") == "auto" else how.get("--format")
    sources = find_sources(options.inputs, form, how.get("--field", "text"), folder=None, out=root)
    if record.months:
        stream = Stream.open(root / STREAM)
        hashes = sorted(file_sha256(Path(source.path)) for source in sources)
        known = [sorted(each.get("sha256", "") for each in entry["inputs"]) for entry in stream.history]
        was_unfinished = _finish(root, record, *((options.budget, options.size) if hashes == known[-1] else ()))
        if hashes in known:
            if not was_unfinished:
                print_line(f"{root}: month {known.index(hashes) + 1} has this text already; nothing to do", sys.stdout)
            return
        if not options.another_language:
            _refuse_another_language(stream, sources)
    split = ["--append"] if record.months else [*SPLITS, "--vocab-size", "auto"]
    with open(root / LOG, "a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        try:
            prep_text([*options.inputs, "--out", str(root / STREAM), "--megabatches", "1", *record.text, *split])
        except AlmaError as error:
            if not str(error).startswith(("--megabatches", "--valid-bytes", "--test-bytes", "--holdout-bytes")):
                raise
            raise AlmaError(f"{options.inputs[0]}: not enough text or documents for a month ({error})") from error
    _finish(root, record, options.budget, options.size)


def _redo(root: Path, record: UpdateRecord, options: UpdateOptions) -> None:
    """Train the newest month again in a new run, which then replaces the run."""
    if not record.months:
        raise AlmaError(f"{root}: no month to redo; give NEW_TEXT for the first one")
    was_unfinished = record.redo is None and _finish(root, record)
    last = record.months[-1]
    action = last.step[0] if options.size is None else "restart"
    first = last.first if action == "continue" else len(record.months) - 1
    redo = Month((action, options.budget), first, options.size or last.size, True, last.before)
    redo.train_tokens = last.train_tokens
    if was_unfinished and (last.step, last.size) == (redo.step, redo.size):
        return  # the call that was killed had the same options
    if record.redo is None or (record.redo.step, record.redo.size) != (redo.step, redo.size):
        shutil.rmtree(root / NEXT, ignore_errors=True)
        record.redo = redo
        record.save(root)
    _finish(root, record)


def _finish(root: Path, record: UpdateRecord, budget: float = BUDGET, size: Optional[int] = None) -> bool:
    """Train the newest month, write report and export, and print its tests; return whether it was unfinished."""
    stream, months = Stream.open(root / STREAM), record.months
    index = stream.num_megabatches - 1
    if len(months) == index:
        tokens = [stream.megabatch(t).num_tokens for t in range(index + 1)]
        spent = sum(month.train_tokens for month in months)
        action, passes = next_step(months[-1].params if months else 0, tokens, spent, budget)
        if months and size is not None:
            action, passes = "restart", budget
        if action != "continue" and size is None and "--arch" not in record.words:
            assert stream.tokenizer is not None
            size = new_size(passes * sum(tokens), stream.tokenizer.vocab_size)
        first = months[-1].first if action == "continue" else index
        months.append(Month((action, passes), first, size, replaces=action == "restart"))
        record.save(root)
    month = record.redo or months[index]
    if month.is_done:
        return False
    if not month.params:
        if month.replaces and month.before is None and record.redo is None:
            month.before = _test_old_model(root, record, stream)
        _train(root, record, month, index)
        months[index], record.redo = month, None
        record.save(root)
    if month.replaces and (root / NEXT).exists():  # update.json has the figures of the new run from here on
        shutil.rmtree(root / RUN, ignore_errors=True)
        (root / NEXT).rename(root / RUN)
        synchronise(root)
    _conclude(root, months, stream)
    month.is_done = True
    record.save(root)
    return True


def _test_old_model(root: Path, record: UpdateRecord, stream: Stream) -> Optional[float]:
    """Return the bits per byte of the old model on the held-out part of the month with which a new model begins."""
    split, run = stream.split(holdout_name(len(record.months) - 1)), RunFolder(root / RUN)
    if not split.num_tokens:
        return None
    path = stage_predictor(run, run.read_stage(len(record.months) - 2 - record.months[-2].first) or {})
    words = ["fairseq-eval-lm", str(stream.root), "--task", "alma_lm", "--path", str(path), "--gen-subset", split.name]
    words += ["--cpu"] if "--cpu" in record.words else []
    losses = call("fairseq_alma.text.split_losses:main", words=words, log=root / LOG)
    return bits_per_byte(losses[split.name], split.num_tokens, split.num_bytes)


def _train(root: Path, record: UpdateRecord, month: Month, index: int) -> None:
    """Train a month and set its figures."""
    run = RunFolder(root / (NEXT if month.replaces else RUN))
    if month.first < index and not run.root.exists():  # the new run has the stages before this one
        copy = root / f"{NEXT}.tmp"
        shutil.rmtree(copy, ignore_errors=True)
        left_out = shutil.ignore_patterns(f"stage-{index - month.first:03d}", ".lock*")
        shutil.copytree(root / RUN, copy, ignore=left_out, copy_function=os.link)  # files are never changed
        copy.rename(run.root)
    argv = ["--stream", str(root / STREAM), "--run", str(run.root), "--replay", "--passes-of-new"]
    argv += ["--first-wait", str(month.first + 1), "--passes", f"{month.step[1]:.6g}"]
    argv += ["--size", str(month.size)] if month.size is not None else []
    argv += ["--keep", str(index - 1)] if index > month.first else []  # for a redo
    with open(root / LOG, "a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        if status := stream_main([*argv, "--", *record.words]):
            raise SystemExit(status)
    stage = run.read_stage(index - month.first)
    assert stage is not None
    held_out = {each["megabatch"]: each for each in stage.get("holdouts", [])}
    month.months = [held_out[t]["bits_per_byte"] if t in held_out else None for t in range(index + 1)]
    if month.before is None and index in held_out and held_out[index]["before"] is not None:
        month.before = held_out[index]["before"]["bits_per_byte"]
    month.test, month.params = stage["test"]["bits_per_byte"], stage["num_params"]
    month.train_tokens += stage["train_tokens"]


def _conclude(root: Path, months: Sequence[Month], stream: Stream) -> None:
    """Write report and export, and print the tests of the newest month."""
    run, new = RunFolder(root / RUN), root / f".{EXPORT}.new"
    checkpoint = stage_predictor(run, run.read_stage(len(months) - 1 - months[-1].first) or {})
    shutil.rmtree(new, ignore_errors=True)
    call("fairseq_alma.cli.report:main", [str(run.root), "--out", str(root / REPORT)], log=root / LOG)
    words = [str(checkpoint), "--out", str(new), "--stream", str(stream.root)]
    call("fairseq_alma.cli.export:main", words, log=root / LOG)
    shutil.rmtree(root / EXPORT, ignore_errors=True)
    new.rename(root / EXPORT)
    split = stream.megabatch(len(months) - 1)
    first = f"month {len(months)} of {root}: {split.num_documents:,} documents, {split.num_bytes:,} bytes"
    last = (f"report: {root / REPORT / 'index.html'}", f"model for transformers: {root / EXPORT}")
    for line in (first, *describe(months), *last):
        print_line(line, sys.stdout)


def describe(months: Sequence[Month]) -> Iterator[str]:
    """Yield the lines about the newest month: bits per byte before and after it, and its training."""
    month, last = months[-1], months[-2] if len(months) > 1 else Month(("", 0), 0)
    rows = {
        "everything so far": ([*last.months, month.before], month.months),
        "old text": (last.months, month.months[:-1]),
        "new month": ([month.before], month.months[-1:]),
        "first month's test": ([last.test], [month.test]),
    }
    for what, values in rows.items():
        before, after = (fmean(known) if (known := [x for x in each if x is not None]) else None for each in values)
        if before is not None and after is not None:
            change = f"{abs(100 * (after / before - 1)):.1f} % {'worse' if after > before else 'better'}"
            yield f"{what}: {before:.3f} bits per byte before, {after:.3f} after ({change})"
            if what == "old text" and after > WORSE * before:
                yield f"warning: old text is predicted {change} than before; --redo --budget R trains with R passes"
        elif after is not None:
            yield f"{what}: {after:.3f} bits per byte"
    action, passes = month.step
    how = {"begin": "a new model", "restart": "a new, larger model", "continue": "the model continues"}
    text = "the new text" if action == "continue" else "all text so far"
    yield f"training: {how[action]}, {passes:.2g} passes through {text} (drawn from all months)"
    yield f"model: {month.params:,} parameters, {sum(each.train_tokens for each in months):,} tokens trained on"


def _refuse_another_language(stream: Stream, sources: Sequence[Source]) -> None:
    """Raise AlmaError if the tokenizer needs many more tokens for a month's text than for that of the first month."""
    blocks = [block for source in sources for block in itertools.islice(FilePart(source).blocks(), 1)]
    texts = [text for block in blocks for text in documents_of(block)[:SAMPLED_DOCUMENTS]]
    num_tokens = sum(map(len, StreamTokenizer.open(stream.root).encode_batch(texts))) + len(texts)
    found = sum(len(text.encode()) for text in texts) / max(1, num_tokens)
    usual = stream.megabatch(0).num_bytes / max(1, stream.megabatch(0).num_tokens)
    if texts and found < LEAST_OF_USUAL * usual:
        raise AlmaError(
            f"{sources[0].label}: {found:.2f} bytes per token, the first month has {usual:.2f}; the language or the "
            "encoding differs; give other text, or --another-language to accept it"
        )
