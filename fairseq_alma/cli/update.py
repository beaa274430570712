"""``alma-update``: train a language model on monthly text. MODEL/ holds the stream, run, report and exported model.

The command calls ``alma-prep-text``, ``alma-stream``, ``alma-report`` and ``alma-export``. Each step of a month updates
``update.json`` (`UpdateRecord`), so that the next call resumes a killed call.
"""

import contextlib
import itertools
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Iterator, Optional, Sequence

import msgspec
from msgspec import Struct

from data_prep.text.assignment import TooLittleTextError
from data_prep.text.command import parse_options
from data_prep.text.command import run as prepare_text
from data_prep.text.documents import FORMATS, FORMS_OF_TEXT, FilePart, Source, documents_of, find_sources
from fairseq_alma.cli.stream import main as stream_main
from fairseq_alma.data.stream import Stream, file_sha256, split_name
from fairseq_alma.data.tokens import StreamTokenizer
from fairseq_alma.errors import AlmaError, refuse_colon
from fairseq_alma.exchange import ARCHITECTURE, refuse_model
from fairseq_alma.files import as_record, locked, read_json_object, require_version, synchronise, write_json_atomically
from fairseq_alma.learners.learner import ModelId
from fairseq_alma.options import Options, given_values, operand, opt, real, utf8_path, utf8_word
from fairseq_alma.runs.run_folder import RUN, RUN_RECORD, RunFolder, stage_predictor
from fairseq_alma.runs.study import read_size
from fairseq_alma.terminal import Parser, command, print_line, split_words
from fairseq_alma.text.helper import call
from fairseq_alma.text.stage_checkpoints import is_sound
from fairseq_alma.text.train_options import (
    BALANCING,
    END_OPTIONS,
    OwnedOptionError,
    TrainOptions,
    model_of,
    num_params,
    row_of,
)

RECORD, VERSION = "update.json", 2
STREAM, LOG = "stream", "update.log"
BUDGET = 3.0
LEAST_PASSES = 1.0  # minimum passes through the new text, also if the trained tokens of all months exceed the budget
LEAST_RESTART = 1.5  # minimum passes through all text for a larger model to reach the loss of the current model
TOKENS_PER_PARAMETER = 8  # maximum number of tokens (all text so far); with more, the model is too small
AHEAD = 6  # expected growth of the text, as a factor; a new model is sized for the grown text (how-to/monthly.md)
LEAST_TOKENS = 8_100_000  # a new model is sized for at least this number: at least four layers of width 144
WORSE = 1.01  # threshold of the warning: bits per byte on old text after the training of a month / before
REPORT, EXPORT = "report", "export"
NEXT = f"{RUN}.next"  # folder of a new run, which replaces the current run after training
# Held-out shares of text in the first month. For later months, only --holdout-bytes applies.
SPLITS = ["--valid-bytes", "3%", "--test-bytes", "5%", "--holdout-bytes", "2%"]
# Minimum bytes per token of a month, relative to the test set, which the tokenizer was not trained on.
# For tokenizers of novels, Wikipedia and Python source, later months have 0.81 to 0.96, other languages 0.36 to 0.71.
LEAST_OF_USUAL = 0.75
LEAST_OF_ACCEPTED = 0.9  # the same, relative to a month after the first, perhaps in another language
SAMPLED_DOCUMENTS = 200
_SHAPE = {"--arch", "--decoder-embed-dim"}  # options after ``--`` that fix the size of each new model
EPILOG = """\
The first call writes MODEL/ with stream/, run/, report/ and export/. Each later call appends NEW_TEXT, trains on the
new text and then on samples of all text so far, tests the model, and updates report and export. The same command
resumes a killed call.
Options after -- are passed to fairseq-train; give them with the first call.

  alma-update model 2026-01.txt.xz
  alma-update model inbox/2026-03/
  alma-update model --redo --budget 6
"""


class Month(Struct, omit_defaults=True):
    """Results and cost of a month in ``update.json``. Test results are bits per byte, None if no text is held out."""

    step: tuple[str, float]  # result of `next_step`
    first: int  # index (numbered from 0) of the newest month in the first stage of the run
    size: Optional[int] = None  # number of parameters of a new model; None if alma-stream chooses the size
    replaces: bool = False  # whether this month trains a new run, which then replaces the current run
    before: Optional[float] = None  # result on the held-out text of this month, before training on the month
    months: list[Optional[float]] = []  # result on the held-out text of each month so far, after training
    test: Optional[float] = None  # result on the test set of the first month, after training
    params: int = 0  # number of parameters; 0 before the training
    train_tokens: int = 0  # number of training tokens, including training runs that --redo replaced
    is_done: bool = False  # whether report and export are written


class UpdateRecord(Struct):
    """``update.json``: options of the first call, and a record for each month."""

    version: int
    text: list[str]  # options of the first call for alma-prep-text
    words: list[str]  # options of the first call for fairseq-train
    months: list[Month]
    redo: Optional[Month] = None  # record of the newest month while --redo trains the month again

    def save(self, root: Path) -> None:
        """Write MODEL/update.json; ``root`` is the model folder."""
        write_json_atomically(root / RECORD, msgspec.to_builtins(self))


def read_record(root: Path) -> UpdateRecord:
    """Return the record of a model, empty for a new model. Raises AlmaError if ``root`` is not a model folder."""
    path, remedy = root / RECORD, "restore it from a backup, or give a new MODEL"
    if path.exists():
        content = read_json_object(path, remedy)
        require_version(content.get("version"), VERSION, path, "give a new MODEL and the texts of all months")
        record = as_record(content, UpdateRecord, path, remedy)
        if record.months and not (root / STREAM).exists():
            raise AlmaError(f"{root / STREAM}: missing; {remedy}")
        return record
    others = {each.name for each in root.iterdir() if not each.name.startswith(".")} if root.is_dir() else set()
    if root.is_file() or (others and not {LOG} <= others <= {LOG, STREAM}):
        raise AlmaError(f"{root}: expected a folder of alma-update, found no {RECORD}; {remedy}")
    return UpdateRecord(VERSION, [], [], [])


def next_step(parameters: int, tokens: Sequence[int], spent: float, budget: float = BUDGET) -> tuple[str, float]:
    """Decide whether to continue the training of the current model, or to train a new, larger model.

    Args:
        parameters: number of parameters of the current model; 0 if there is no model.
        tokens: number of tokens of each month so far, including the new month.
        spent: number of training tokens so far; each pass counts.
        budget: maximum number of training tokens of all months, divided by the number of tokens of all text so far.
            ``--size`` and ``--redo`` may exceed the budget.

    Returns:
        (``begin`` or ``restart``, passes of a new model through all text) or (``continue``, passes through the new
        text).
    """
    total = sum(tokens)
    affordable = min(budget * total - spent, budget * tokens[-1]) / total
    if not parameters:
        return "begin", budget
    if total > TOKENS_PER_PARAMETER * parameters and affordable >= LEAST_RESTART:
        return "restart", affordable
    return "continue", min(budget, max(LEAST_PASSES, (budget * total - spent) / tokens[-1]))


def new_size(tokens: float, vocab_size: int) -> int:
    """Return the number of parameters of a new model; ``tokens``: tokens of its first training run, in all passes."""
    row = row_of(max(LEAST_TOKENS, AHEAD * tokens))
    return num_params(row.width, row.layers, vocab_size)


def describe(months: Sequence[Month], held_out: Sequence[int], test: int) -> Iterator[str]:
    """Yield lines about the newest month: bits per byte before and after training, and cost of training.

    Args:
        months: records of all months so far.
        held_out: bytes of the held-out text of each month, the weights in means over several months.
        test: bytes of the test set of the first month.
    """
    month, last = months[-1], months[-2] if len(months) > 1 else Month(("", 0), 0)
    rows = {
        "all text so far": ([*last.months, month.before] if month.before else [], month.months, held_out),
        "old text": (last.months, month.months[:-1], held_out[:-1]),
        "new month": ([month.before], month.months[-1:], held_out[-1:]),
        "test set of the first month": ([last.test], [month.test], [test]),
    }
    for what, (*values, sizes) in rows.items():
        before, after = (_mean(each, sizes) for each in values)
        if before is not None and after is not None:
            change = f"{abs(100 * (after / before - 1)):.1f} % {'worse' if after > before else 'better'}"
            yield f"{what}: {before:.3f} bits per byte before, {after:.3f} after ({change}; {sum(sizes):,} bytes)"
            if what not in ("all text so far", "new month") and after > WORSE * before:
                yield f"warning: the loss on the {what} is {change}; --redo --budget R trains for R passes instead"
        elif after is not None:
            yield f"{what}: {after:.3f} bits per byte ({sum(sizes):,} bytes)"
    action, passes = month.step
    model, text = "new model", "all text so far"
    if action == "continue":
        model, text = "current model", "the new text (first the new text, then samples of all months)"
    yield f"training: {model}, {passes:.4g} pass{'' if passes == 1 else 'es'} through {text}"
    spent = sum(each.train_tokens for each in months)
    yield f"model: {month.params:,} parameters, {spent:,} training tokens so far, including months trained again"


def _mean(values: Sequence[Optional[float]], sizes: Sequence[int]) -> Optional[float]:
    """Return the mean of the known values, weighted by ``sizes``; None if no value is known."""
    known = [(value, size) for value, size in zip(values, sizes, strict=False) if value is not None]
    return sum(value * size for value, size in known) / sum(size for _, size in known) if known else None


@dataclass(frozen=True)
class UpdateOptions(Options):
    """Options of ``alma-update``; ``format`` and ``field`` apply to the text of all months."""

    model: Path = operand("model folder; created if it does not exist", "MODEL", parse=utf8_path)
    inputs: Sequence[str] = operand("files or folders with the text of one month", "NEW_TEXT", nargs="*", parse=str)
    budget: float = opt(
        BUDGET,
        "maximum passes through the new text, and maximum average over all text so far",
        range=real(0, 1000, above=True),
        metavar="R",
    )
    redo: bool = opt(False, "train on the newest month again, for example with another --budget; give no NEW_TEXT")
    size: Optional[int] = opt(
        None,
        "approximate number of parameters, such as 800k; after month 1, trains a new model (default: automatic)",
        parse=read_size,
    )
    format: Optional[str] = opt(None, "format of the text, the same for all months (default: auto)", choices=FORMATS)
    field: Optional[str] = opt(
        None, "field or column with the text, the same for all months (default: text)", parse=utf8_word, metavar="NAME"
    )
    another_language: bool = opt(False, "accept text in a language that the tokenizer was not trained on")


@command
def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run ``alma-update``."""
    own_words, words = split_words(argv)
    parser = Parser(
        UpdateOptions,
        prog="alma-update",
        usage="alma-update MODEL [NEW_TEXT...] [options] [-- fairseq-train options]",
        description="Train a language model on text, or update a model with the text of one more month.",
        epilog=EPILOG,
    )
    options = UpdateOptions.read(parser.parse_intermixed_args(own_words))  # alma-update MODEL --size 1M NEW_TEXT
    if options.redo == bool(options.inputs):
        parser.error(
            "--redo uses the newest month; remove NEW_TEXT"
            if options.redo
            else "NEW_TEXT: missing; give the text of a month, or --redo"
        )
    try:
        given = given_values(words)
        if end := next((each for each in END_OPTIONS if each in given), None):
            raise ValueError(f"{end} after --: --budget sets the length of the training; remove {end}")
        TrainOptions(["--max-update", "1", "--criterion", BALANCING, *words])  # refuses what alma-stream would refuse
    except ValueError as error:
        if isinstance(error, OwnedOptionError) and error.instead.endswith("before the --"):  # an option of alma-stream
            parser.error(f"{error.name}: alma-update sets this option; remove it")
        parser.error(str(error))
    if options.redo and (words or options.format or options.field):
        parser.error("--redo uses the text and the options of the first call; remove --format, --field and --")
    arch, trees, factor = map(given.get, ("--arch", "--gate-trees", "--eval-capacity-factor"))
    refuse_model("options after --", arch or ARCHITECTURE, bool(trees), float(factor or 0))
    root = options.model
    refuse_colon(root, "MODEL ")
    read_record(root)  # Before writing a lock file, refuse a folder that is not a model folder.
    with locked(root / ".lock", f"{root}", who="alma-update", unused=(".lock", LOG)):
        record = read_record(root)
        if options.redo:
            _redo(root, record, options)
        else:
            _add(root, record, options, words)


def _add(root: Path, record: UpdateRecord, options: UpdateOptions, words: list[str]) -> None:
    """Complete an interrupted month. If no month has the new text, train on it as a new month."""
    _check_first_options(root, record, options, words)
    how = {"--format": "auto", "--field": "text"} | dict(itertools.pairwise(record.text))
    sources = find_sources(options.inputs, how["--format"], how["--field"], folder=None, out=root)
    if record.months:
        stream = Stream.open(root / STREAM)
        hashes = sorted(file_sha256(Path(source.path)) for source in sources)
        known = [sorted(each.get("sha256", "") for each in entry["inputs"]) for entry in stream.history]
        if hashes in known:
            _complete(root, record, options, stream, known.index(hashes))
            return
        _finish(root, record)
        if not options.another_language:
            _refuse_another_language(stream, sources)
    else:  # A call that failed before it planned the first month may have left a stream, perhaps of other text.
        shutil.rmtree(root / STREAM, ignore_errors=True)
    split, text = (["--append"] if record.months else SPLITS), record.text
    if record.months and how["--format"] == "auto" and all(each.form in FORMS_OF_TEXT for each in sources):
        text = []  # A month of plain text needs no --field.
    with open(root / LOG, "a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        try:
            given = [*options.inputs, "--out", str(root / STREAM), "--megabatches", "1", *text, *split]
            prepare_text(replace(parse_options(given), ignored=root))
        except TooLittleTextError as error:
            form = sources[0].form
            fault = str(error).rpartition("; ")[0]  # The advice names options of alma-prep-text.
            place = {"text": ", separated by empty lines", "lines": ", one on each line", "file": ", one in each file"}
            other = ", or --format lines if each line is a document" if form == "text" and not record.months else ""
            advice = f"give more documents{place.get(form, '')}{other}"
            raise AlmaError(f"{options.inputs[0]}: too little new text for a month ({fault}); {advice}") from error
    _finish(root, record, options.budget, options.size)


def _check_first_options(root: Path, record: UpdateRecord, options: UpdateOptions, words: list[str]) -> None:
    """Record the options of the first call. Raises AlmaError if a later call has other options."""
    text = [word for name in ("format", "field") if (value := getattr(options, name)) for word in (f"--{name}", value)]
    if not record.months:
        record.text, record.words = text, words
    elif text in ([], record.text) and not any(month.params for month in record.months):
        if record.words and not words:
            note = f"using the options of the first call ({' '.join(record.words)}); give others to change"
            print_line(f"note: {root}: {note}", sys.stderr)
        elif words != record.words:  # The user can correct an option as long as no month is trained.
            record.months = [_plan([], Stream.open(root / STREAM), words, options.budget, options.size)]
            record.words = words
            _remove_run(root)  # may have a checkpoint with the other options
            record.save(root)
    elif (text or words) and (text, words) != (record.text, record.words):
        first = " ".join([*record.text, *(["--", *record.words] if record.words else [])]) or "none"
        raise AlmaError(
            f"{root / RECORD}: expected the options of the first call ({first}); give these options or none, or a "
            "new MODEL"
        )


def _complete(root: Path, record: UpdateRecord, options: UpdateOptions, stream: Stream, index: int) -> None:
    """Complete the newest month after a call with the text of month ``index``; an untrained month takes new options."""
    given, differs, is_newest = (options.budget, options.size), False, index == stream.num_megabatches - 1
    if len(record.months) == stream.num_megabatches and given != (BUDGET, None):
        *before, newest = record.months
        wanted = _plan(before, stream, record.words, *given)
        differs = (wanted.step, wanted.size) != (newest.step, newest.size)
        if differs and is_newest and not newest.params:  # `_finish` plans the month again
            run = RunFolder(root / (NEXT if newest.replaces else RUN))
            shutil.rmtree(run.stage_folder(len(before) - newest.first), ignore_errors=True)
            record.months, differs = before, False
    was_unfinished = _finish(root, record, *(given if is_newest else ()))
    notes = [] if was_unfinished else [f"month {index + 1} already has this text; nothing to do"]
    notes += ["to train the newest month with another --budget or --size, give --redo"] if differs else []
    if notes:
        print_line(f"{root}: {'; '.join(notes)}", sys.stdout)


def _redo(root: Path, record: UpdateRecord, options: UpdateOptions) -> None:
    """Train on the newest month again in a new run, which then replaces the current run."""
    if not record.months:
        raise AlmaError(f"{root}: no month to redo; remove --redo and give NEW_TEXT for the first month")
    was_unfinished = record.redo is None and _finish(root, record)
    last = record.months[-1]
    action = last.step[0] if options.size is None else "restart"
    _check_size(Stream.open(root / STREAM), record.words, options.size)
    first = last.first if action == "continue" else len(record.months) - 1
    step, size = (action, options.budget), options.size or last.size
    redo = Month(step, first, size, replaces=True, before=last.before, train_tokens=last.train_tokens)
    if was_unfinished and (last.step, last.size) == (step, size):
        return  # `_finish` has completed a killed call that had the same options.
    if record.redo is None or (record.redo.step, record.redo.size) != (step, size):
        shutil.rmtree(root / NEXT, ignore_errors=True)
        record.redo = redo
        record.save(root)
    _finish(root, record)


def _finish(root: Path, record: UpdateRecord, budget: float = BUDGET, size: Optional[int] = None) -> bool:
    """Complete the newest month (training, report, export), and return whether the month was incomplete."""
    stream, months = Stream.open(root / STREAM), record.months
    index = stream.num_megabatches - 1
    if not index <= len(months) <= index + 1:
        raise AlmaError(
            f"{root / STREAM}: expected {len(months)} months as in {RECORD}, found {index + 1}; restore MODEL from a "
            "backup, or give a new MODEL and all texts"
        )
    if len(months) == index:
        months.append(_plan(months, stream, record.words, budget, size))
        record.save(root)
    month = record.redo or months[index]
    if month.is_done:
        return False
    run = RunFolder(root / (NEXT if month.replaces and (root / NEXT).exists() else RUN))
    if month.params and run.read_stage(index - month.first) is None:  # The user removed a damaged stage.json.
        month.params = month.train_tokens = 0
    if not month.params:
        if month.replaces and month.before is None and record.redo is None:
            month.before = _test_old_model(root, record, stream)
        _train(root, record, month, index)
        months[index], record.redo = month, None
        record.save(root)
    if month.replaces and (root / NEXT).exists():  # update.json has the results of the new run.
        _remove_run(root)
        (root / NEXT).rename(root / RUN)
        synchronise(root)
    _conclude(root, months, stream)
    month.is_done = True
    record.save(root)
    return True


def _remove_run(root: Path) -> None:
    shutil.rmtree((root / RUN).resolve(), ignore_errors=True)
    (root / RUN).unlink(missing_ok=True)  # a link, for example to another disk


def _plan(before: Sequence[Month], stream: Stream, words: Sequence[str], budget: float, size: Optional[int]) -> Month:
    """Return the record of a month before its training, given the records of the months before."""
    _check_size(stream, words, size)
    tokens = [stream.megabatch(t).num_tokens for t in range(len(before) + 1)]
    parameters = before[-1].params if before else 0
    if before and _SHAPE & given_values(words).keys():
        parameters = sum(tokens)  # A new model would not be larger.
    action, passes = next_step(parameters, tokens, sum(month.train_tokens for month in before), budget)
    if before and size is not None:
        action, passes = "restart", budget
    if action != "continue" and size is None and "--arch" not in given_values(words):
        assert stream.tokenizer is not None
        size = new_size(passes * sum(tokens), stream.tokenizer.vocab_size)
    first = before[-1].first if action == "continue" else len(before)
    return Month((action, passes), first, size, replaces=action == "restart")


def _check_size(stream: Stream, words: Sequence[str], size: Optional[int]) -> None:
    """Raise AlmaError if alma-stream would refuse ``--size``, before update.json records the size."""
    if size is not None and stream.tokenizer is not None:
        model_of(size, stream.tokenizer.vocab_size, given_values(words))


def _test_old_model(root: Path, record: UpdateRecord, stream: Stream) -> Optional[float]:
    """Return the current model's bits per byte on the held-out text of the newest month; None without text or model."""
    split, run = stream.split(split_name(len(record.months) - 1, "holdout")), RunFolder(root / RUN)
    try:
        settings, stage = run.read_run(), run.read_stage(len(record.months) - 2 - record.months[-2].first)
        path = stage_predictor(run, stage) if stage is not None else Path()
    except AlmaError:  # The new model may replace a damaged one.
        return None
    if not split.num_tokens or settings is None or not is_sound(path):
        return None
    options = TrainOptions([word for option in settings["train_options"].items() for word in option if word])
    words = [
        *("fairseq-eval-lm", str(stream.root), "--task", "alma_lm", "--path", str(path), "--gen-subset", split.name),
        *(word for option in options.for_evaluation() for word in option),
    ]
    losses = call("fairseq_alma.text.losses:evaluate", words=words, log=root / LOG)
    return split.bits_per_byte(losses[split.name])


def _train(root: Path, record: UpdateRecord, month: Month, index: int) -> None:
    """Train on month ``index`` (numbered from 0), and store results and cost in ``month``."""
    run, last = RunFolder(root / (NEXT if month.replaces else RUN)), index - month.first - 1
    earlier = run if run.root.exists() else RunFolder(root / RUN)
    model = earlier.checkpoint(ModelId(last, 0))
    if last >= 0 and not (is_sound(model) and (earlier.root / RUN_RECORD).is_file()):
        raise AlmaError(  # Otherwise, alma-stream would train another model on the older months.
            f"{earlier.root}: expected {RUN_RECORD} and {model.relative_to(earlier.root)}, found a missing or damaged "
            "file; restore the folder from a backup, or repeat the command with --size N to train a new model"
        )
    if last >= 0 and not run.root.exists():  # The new run needs the earlier stages.
        copy = root / f"{NEXT}.tmp"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(root / RUN, copy, ignore=shutil.ignore_patterns(f"stage-{index - month.first:03d}", ".lock*"))
        synchronise(copy, *copy.rglob("*"))  # before the run is removed
        copy.rename(run.root)
    argv = [
        *("--stream", str(root / STREAM), "--run", str(run.root), "--replay", "--first-wait", str(month.first + 1)),
        # The first third of the passes, at most one pass, reads only new text; the other passes sample from all text.
        *("--new-first", f"{min(1, month.step[1] / BUDGET):.6g}", "--passes", f"{month.step[1]:.6g}"),
        *(("--size", str(month.size)) if month.size is not None else ()),
        *(("--keep", str(index - 1)) if index > month.first else ()),  # for a later --redo
        *("--", *record.words),
    ]
    with open(root / LOG, "a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        if status := stream_main(argv):
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
    """Write the report and the export, and print the test results of the newest month."""
    run, export = RunFolder(root / RUN), (root / EXPORT).resolve()  # may be a link, for example to another disk
    new = export.with_name(f".{EXPORT}.new")
    checkpoint = stage_predictor(run, run.read_stage(len(months) - 1 - months[-1].first) or {})
    shutil.rmtree(new, ignore_errors=True)
    call("fairseq_alma.cli.report:main", [str(run.root), "--out", str(root / REPORT)], log=root / LOG)
    words = [str(checkpoint), "--out", str(new), "--stream", str(stream.root)]
    call("fairseq_alma.cli.export:main", words, log=root / LOG)
    shutil.rmtree(export, ignore_errors=True)
    new.rename(export)
    split, made = stream.megabatch(len(months) - 1), stream.history[len(months) - 1]
    number = f"{split.num_documents:,} document{'' if split.num_documents == 1 else 's'}"
    first = f"month {len(months)} of {root}: {number}, {split.num_bytes:,} bytes"
    if dropped := made["duplicate_bytes"] + made.get("contaminated_bytes", 0):
        first += f" ({dropped:,} bytes dropped that repeat earlier or held-out text, see {root / LOG})"
    held_out = [stream.split(split_name(t, "holdout")).num_bytes for t in range(len(months))]
    for line in (
        first,
        *describe(months, held_out, stream.split("test").num_bytes),
        f"report: {root / REPORT / 'index.html'}",
        f"model for transformers: {root / EXPORT}",
    ):
        print_line(line, sys.stdout)


def _refuse_another_language(stream: Stream, sources: Sequence[Source]) -> None:
    """Raise AlmaError if a month needs many more tokens per byte than the test set and every month after the first."""
    sampled = sources[:: -(-len(sources) // SAMPLED_DOCUMENTS)]
    # The second block has the last document of a short file.
    blocks = (block for source in sampled for block in itertools.islice(FilePart(source).blocks(), 2))
    texts = [text for block in blocks for text in documents_of(block)[: -(-SAMPLED_DOCUMENTS // len(sampled))]]
    num_tokens = sum(map(len, StreamTokenizer.open(stream.root).encode_batch(texts))) + len(texts)
    found = sum(len(text.encode()) for text in texts) / max(1, num_tokens)
    splits = (stream.split("test"), *map(stream.megabatch, range(1, stream.num_megabatches)))
    usual, *accepted = (each.num_bytes / max(1, each.num_tokens) for each in splits)
    least = min([LEAST_OF_USUAL * usual, *(LEAST_OF_ACCEPTED * each for each in accepted)])
    if num_tokens >= 100 and found < least:  # A few words do not identify a language.
        raise AlmaError(
            f"{sources[0].label}: expected about {usual:.2f} bytes per token, as in the test set, found {found:.2f} "
            "(maybe another language, code, tables or another encoding); give other text, or --another-language to "
            "accept the text"
        )
