"""``alma-update``: the monthly job. One folder holds stream, run, report and exported model; each call adds a month.

It only puts the other commands together: ``alma-prep-text`` (``--append``), ``alma-stream``, ``alma-report`` and
``alma-export``, each of which resumes or begins anew after a kill, and so does this. ``update.json`` has the options of
the first call, and for each month what was decided (`next_step`) and the tests after it.
"""

import contextlib
import itertools
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Iterator, NamedTuple, Optional, Sequence

import msgspec
from msgspec import Meta, Struct

import fairseq_alma
from data_prep.text.command import main as prep_text
from data_prep.text.documents import FilePart, Source, documents_of
from data_prep.text.options import FORMATS
from data_prep.text.source import find_sources
from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.data.stream import MANIFEST, Stream, file_sha256, holdout_name
from fairseq_alma.data.tokens import StreamTokenizer
from fairseq_alma.errors import AlmaError, printable
from fairseq_alma.exchange.exportable import ARCHITECTURE, refuse_model
from fairseq_alma.files import as_record, locked, read_json_object, synchronise, write_json_atomically
from fairseq_alma.metrics import bits_per_byte
from fairseq_alma.options import Options, opt, real, utf8_path, utf8_word
from fairseq_alma.runs.run_folder import RunFolder, stage_predictor
from fairseq_alma.runs.study import read_size
from fairseq_alma.terminal import format_duration, print_line
from fairseq_alma.text.command import Command
from fairseq_alma.text.defaults import num_params, row_of
from fairseq_alma.text.helper import call

RECORD, VERSION = "update.json", 2
STREAM, RUN, REPORT, EXPORT, LOG = "stream", "run", "report", "export", "update.log"
NEXT, OLD = "run.next", "run.old"
"""The run that is to replace the other one, and the replaced one for a moment."""
SPLITS = ["--valid-bytes", "3%", "--test-bytes", "5%", "--holdout-bytes", "2%"]
"""What the first call holds out; the last for each month."""
BUDGET = 3.0
LEAST_RESTART = 1.5
"""Passes through all text so far that a larger model needs at least to catch up with the model that it replaces."""
TOKENS_PER_PARAMETER = 8
"""With more tokens for each parameter, a model is too small for what it has read."""
AHEAD = 6
"""A new model has the size for this many times the text so far, as more will come (measured: how-to/monthly.md)."""
LEAST_TOKENS = 2_600_000
"""A new model has at least the size for a run of this many tokens (width 128), as a small first month is followed by
more text: after six months of novels, mean bits per byte were 1.960 with 1.15 million parameters and batch 2, 2.004
with 522 thousand and batch 4, 2.065 with the 320 thousand of the first month's size and batch 8."""
WORSE = 1.01
"""From this ratio of bits per byte on, a warning says that old text is predicted worse than before."""
LEAST_OF_USUAL = 0.7
"""Bytes per token that a month may have at least, as a share of those of the first month."""
SAMPLED_DOCUMENTS, SAMPLE_TOKENS = 200, 40
_REMEDY = "restore it from a backup, or begin a new MODEL"
EPILOG = """\
The first call makes MODEL/ with stream/, run/, report/ and export/. Each further call appends its text, trains on draws
from all text so far, tests, and writes report and export anew. A killed call resumes with the same command. Options
after -- are passed to fairseq-train; only the first call takes them.

  alma-update model 2026-01.txt.xz
  alma-update model 2026-02.jsonl
  alma-update model inbox/2026-03/
  alma-update model --redo --budget 6
"""


class Decision(NamedTuple):
    """What a month does with the model.

    Attributes:
        action: ``begin`` or ``restart`` with a new model on all text so far, or ``continue``.
        passes: through the new text; of a new model through all text.
    """

    action: str
    passes: float


def next_step(parameters: int, tokens: Sequence[int], spent: float, budget: float = BUDGET) -> Decision:
    """Decide whether the model continues, or a larger one begins.

    Args:
        parameters: of the model; 0: there is none.
        tokens: of each month so far, the new one last.
        spent: tokens that all months before have trained on, with each pass counted.
        budget: passes; all months together never cost more than this through all text so far.
    """
    total = sum(tokens)
    affordable = (budget * total - spent) / total
    if not parameters:
        return Decision("begin", budget)
    if total > TOKENS_PER_PARAMETER * parameters and affordable >= LEAST_RESTART:
        return Decision("restart", min(budget, affordable))
    return Decision("continue", min(budget, (budget * total - spent) / tokens[-1]))


def new_size(tokens: float, vocab_size: int) -> int:
    """Return the parameters of a new model that is trained on so many tokens now, all passes counted."""
    row = row_of(max(LEAST_TOKENS, AHEAD * tokens))
    return num_params(row.width, row.layers, vocab_size)


@dataclass(frozen=True)
class UpdateOptions(Options):
    """What a call decides for its month; how text is read, for all of them."""

    budget: float = opt(
        BUDGET,
        "passes through its text that a month may cost; all months never cost more through all text so far",
        range=real(0, 1000, above=True),
        metavar="R",
    )
    redo: bool = opt(False, "train the newest month again, with another --budget or --size; gives no new text")
    size: Optional[int] = opt(
        None, "parameters, such as 800k or 25M; later a new model of this size (default: by the text)", parse=read_size
    )
    format: Optional[str] = opt(None, "as alma-prep-text --format, for every month", choices=FORMATS)
    field: Optional[str] = opt(None, "as alma-prep-text --field, for every month", parse=utf8_word, metavar="NAME")
    another_language: bool = opt(False, "accept a month whose text does not suit the tokenizer")


class Month(Struct, omit_defaults=True):
    """What ``update.json`` has for a month.

    Attributes:
        step: action and passes; see `Decision`.
        size: parameters that the user asked for.
        first: the month, from 0, with which the model's run began.
        before: bits per byte on its held-out part before its training.
        months: bits per byte on the held-out part of each month so far, after it; None: nothing is held out.
        test: bits per byte on the first month's test.
        params: of the model after it.
        train_tokens: that it trained on, those of what was redone included.
        seconds: of the call.
    """

    step: tuple[str, float]
    first: int
    size: Optional[int] = None
    before: Optional[float] = None
    months: list[Optional[float]] = []
    test: Optional[float] = None
    params: int = 0
    train_tokens: int = 0
    seconds: float = 0.0
    is_done: bool = False


class UpdateRecord(Struct):
    """``update.json``: options of the first call (alma-prep-text, after ``--``), the months, and a pending redo."""

    kind: Annotated[str, Meta(pattern="^alma-update$")]
    version: int
    text: list[str]
    words: list[str]
    months: list[Month]
    redo: Optional[Month] = None


class Model:
    """The folder of a model that is updated.

    Args:
        root: MODEL/.

    Attributes:
        record: ``update.json``; None: there is none yet.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.record: Optional[UpdateRecord] = None
        path = root / RECORD
        if path.exists():
            content = read_json_object(path, _REMEDY)
            if content.get("kind") == "alma-update" and content.get("version") != VERSION:
                raise AlmaError(
                    f"{path}: written by version 0.2.0, whose streams and checkpoints are not read any more; begin a "
                    "new MODEL with the same texts, or install fairseq-alma 0.2.0"
                )
            self.record = as_record(content, UpdateRecord, path, _REMEDY)
            return
        others = {each.name for each in root.iterdir() if not each.name.startswith(".")} if root.is_dir() else set()
        if root.is_file() or others - {STREAM, LOG}:
            raise AlmaError(
                f"{root}: not a folder of alma-update, there is no {RECORD} in it; give a new folder, or one that "
                "alma-update made"
            )

    @property
    def run(self) -> RunFolder:
        """The run."""
        return RunFolder(self.root / RUN)

    def stream(self) -> Optional[Stream]:
        """Return the stream; None: there is none yet."""
        return Stream.open(self.root / STREAM) if (self.root / STREAM / MANIFEST).is_file() else None

    def save(self) -> None:
        """Write ``update.json``."""
        write_json_atomically(self.root / RECORD, msgspec.to_builtins(self.record))

    def recover(self) -> None:
        """Finish, or undo, the replacement of a run that a kill has cut off."""
        old = self.root / OLD
        if old.exists() and (self.root / RUN).exists():
            shutil.rmtree(old)
        elif old.exists():
            old.rename(self.root / RUN)

    def replace_run(self) -> None:
        """Put the new run in place of the other one."""
        if (self.root / RUN).exists():
            (self.root / RUN).rename(self.root / OLD)
        (self.root / NEXT).rename(self.root / RUN)
        synchronise(self.root)
        shutil.rmtree(self.root / OLD, ignore_errors=True)

    @contextlib.contextmanager
    def logged(self) -> Iterator[None]:
        """Let what commands print go to ``update.log``; their progress, notes and errors stay on standard error."""
        with open(self.root / LOG, "a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
            yield


def build_parser() -> Parser:
    """Return the parser of what stands before ``--``."""
    parser = Parser.of(
        "alma-update",
        "Make a language model of text, or teach it the text of one more month.",
        EPILOG,
        UpdateOptions,
        usage="alma-update MODEL [NEW_TEXT...] [options] [-- fairseq-train options]",
    )
    parser.add_argument("model", type=utf8_path, metavar="MODEL", help="folder of the model; made if it is not there")
    parser.add_argument("inputs", nargs="*", metavar="NEW_TEXT", help="files or folders: one month")
    return parser


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run ``alma-update``."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = build_parser()
    arguments = parser.parse_args(words[:cut])
    options, root = UpdateOptions.read(arguments), arguments.model
    if options.redo == bool(arguments.inputs):
        parser.error(
            "--redo: trains the newest month again, give no NEW_TEXT" if options.redo else "NEW_TEXT is needed"
        )
    sources = [] if options.redo else _sources(arguments.inputs, root, options)
    is_new = not root.exists()
    try:
        Model(root)  # what cannot be shows before anything is written
        with locked(root / ".lock", f"{root}", who="alma-update"):
            model = Model(root)
            model.recover()
            if options.redo:
                _redo(model, options)
            else:
                _update(model, sources, arguments.inputs, options, words[cut + 1 :])
            return 0
    finally:
        if is_new and root.is_dir() and {each.name for each in root.iterdir()} <= {".lock", LOG}:
            shutil.rmtree(root)


def _update(
    model: Model, sources: Sequence[Source], inputs: Sequence[str], options: UpdateOptions, words: Sequence[str]
) -> None:
    """Add a month, or finish one."""
    started = time.monotonic()
    text = [word for flag in ("format", "field") if (value := getattr(options, flag)) for word in (f"--{flag}", value)]
    stream = model.stream()
    if model.record is not None and (text or words) and [*text, *words] != [*model.record.text, *model.record.words]:
        before = " ".join([*model.record.text, *model.record.words]) or "none"
        raise AlmaError(
            f"{model.root / RECORD}: the model was begun with other options ({before} then, "
            f"{' '.join([*text, *words])} now); leave them out, or begin another MODEL"
        )
    refuse_model("after the --: --arch", dict(itertools.pairwise(words)).get("--arch", ARCHITECTURE))
    if stream is not None and model.record is not None:
        seen = _month_of(stream, sources)
        is_last = seen == stream.num_megabatches - 1
        finished = _finish(model, stream, options if is_last else UpdateOptions(), started)
        if seen is not None:
            if not finished:
                print_line(f"{model.root}: month {seen + 1} has this text already; nothing to do", sys.stdout)
            return
        _refuse_another_language(model, stream, sources, options)
    with model.logged():
        out = ["--out", str(model.root / STREAM), "--megabatches", "1"]
        how = [*text, *SPLITS, "--vocab-size", "auto"] if model.record is None else [*model.record.text, "--append"]
        try:
            prep_text([*inputs, *out, *how])
        except AlmaError as error:
            if not str(error).startswith(("--megabatches", "--valid-bytes", "--test-bytes", "--holdout-bytes")):
                raise
            raise AlmaError(f"{inputs[0]}: too little text, or too few documents, for a month ({error})") from error
    stream = model.stream()
    assert stream is not None
    if model.record is None:
        model.record = UpdateRecord("alma-update", VERSION, text, [*words], [])
        model.save()
    _finish(model, stream, options, started)


def _redo(model: Model, options: UpdateOptions) -> None:
    """Train the newest month again, next to the run; the new run replaces it at the end."""
    started, record, stream = time.monotonic(), model.record, model.stream()
    if record is None or stream is None or not record.months:
        raise AlmaError(f"{model.root}: no month to redo; give NEW_TEXT for the first one")
    _finish(model, stream, UpdateOptions(), started)
    last = record.months[-1]
    passes = options.budget
    is_new_model = last.step[0] != "continue" or options.size is not None
    first = len(record.months) - 1 if is_new_model else last.first
    wanted = Month((last.step[0] if options.size is None else "restart", passes), first, options.size)
    wanted.before, wanted.train_tokens = last.before, last.train_tokens
    if record.redo is None or (record.redo.step, record.redo.size) != (wanted.step, wanted.size):
        shutil.rmtree(model.root / NEXT, ignore_errors=True)
        record.redo = wanted
        model.save()
    if not is_new_model and not (model.root / NEXT).exists():
        _copy_run(model, len(record.months) - 1 - last.first)
    _train(model, stream, record.redo, model.root / NEXT, started, len(record.months) - 1)
    record.months[-1], record.redo = record.redo, None
    model.save()
    _conclude(model, stream)


def _copy_run(model: Model, last: int) -> None:
    """Make the new run of all but the last stage of the other one; files are linked, as they are only replaced."""
    unfinished = model.root / f"{NEXT}.tmp"
    shutil.rmtree(unfinished, ignore_errors=True)
    gone = shutil.ignore_patterns(f"stage-{last:03d}", ".lock*")
    shutil.copytree(model.root / RUN, unfinished, ignore=gone, copy_function=_link)
    unfinished.rename(model.root / NEXT)


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


def _finish(model: Model, stream: Stream, options: UpdateOptions, started: float) -> bool:
    """Train on a month that is in the stream and not done, and print its worth; return whether there was one."""
    assert model.record is not None
    index, months = stream.num_megabatches - 1, model.record.months
    if len(months) <= index:
        months.append(_decide(model, stream, options))
        model.save()
    month = months[index]
    if month.is_done:
        return False
    replaces = index > 0 and month.first == index
    if replaces and month.before is None:
        path = stage_predictor(model.run, model.run.read_stage(index - 1 - months[index - 1].first) or {})
        month.before = _test(model, stream, path, index)
        model.save()
    _train(model, stream, month, model.root / (NEXT if replaces else RUN), started, index)
    model.save()
    _conclude(model, stream)
    return True


def _decide(model: Model, stream: Stream, options: UpdateOptions) -> Month:
    """Return the new month with what it does."""
    assert model.record is not None
    months = model.record.months
    tokens = [stream.megabatch(t).num_tokens for t in range(stream.num_megabatches)]
    spent = sum(month.train_tokens for month in months)
    step = next_step(months[-1].params if months else 0, tokens, spent, options.budget)
    if months and options.size is not None:
        step = Decision("restart", options.budget)
    first, size = months[-1].first if step.action == "continue" else len(months), options.size
    if step.action != "continue" and size is None and "--arch" not in model.record.words:
        assert stream.tokenizer is not None
        size = new_size(step.passes * sum(tokens), stream.tokenizer.vocab_size)
    return Month((step.action, step.passes), first, size)


def _train(model: Model, stream: Stream, month: Month, run: Path, started: float, index: int) -> None:
    """Train a month, take over its figures, and put its run in its place."""
    from fairseq_alma.cli.stream import main as stream_main

    assert model.record is not None
    if not run.exists() and (model.root / RUN).exists() and _has(model.run, index, month):
        run = model.root / RUN  # it was put in its place already
    argv = ["--stream", str(model.root / STREAM), "--run", str(run), "--replay", "--passes-of-new"]
    argv += ["--first-wait", str(month.first + 1), "--passes", f"{month.step[1]:.6g}"]
    argv += ["--size", str(month.size)] if month.size is not None and month.first == index else []
    argv += ["--keep", str(index - 1)] if index > month.first else []
    argv += ["--", *model.record.words] if model.record.words else []
    with model.logged():
        if status := stream_main(argv):
            raise SystemExit(status)
    folder = RunFolder(run)
    stage = folder.read_stage(index - month.first)
    assert stage is not None
    found = {each["megabatch"]: each for each in stage.get("holdouts", [])}
    month.months = [found[t]["bits_per_byte"] if t in found else None for t in range(index + 1)]
    if month.before is None and index in found and found[index]["before"] is not None:
        month.before = found[index]["before"]["bits_per_byte"]
    month.test, month.params = stage["test"]["bits_per_byte"], stage["num_params"]
    month.train_tokens += stage["train_tokens"]
    month.seconds, month.is_done = round(time.monotonic() - started, 1), True
    if run != model.root / RUN:
        model.replace_run()


def _has(run: RunFolder, index: int, month: Month) -> bool:
    """Return whether a run began with a month's first one and has the month."""
    record = run.read_run()
    began = record is not None and record["options"].get("first_wait") == month.first + 1
    return began and run.read_stage(index - month.first) is not None


def _test(model: Model, stream: Stream, path: Path, month: int) -> Optional[float]:
    """Return the bits per byte of a checkpoint on what is held out of a month."""
    assert model.record is not None
    split = stream.split(holdout_name(month))
    if not split.num_tokens:
        return None
    engine = ("--user-dir", str(Path(fairseq_alma.__file__).parent), "--task", "alma_lm")
    cpu = [("--cpu",)] if "--cpu" in model.record.words else []
    groups = ((str(stream.root),), engine, ("--path", str(path), "--gen-subset", split.name), *cpu)
    losses = Command("fairseq-eval-lm", groups).run(model.root / LOG)
    return bits_per_byte(losses[split.name], split.num_tokens, split.num_bytes)


def _conclude(model: Model, stream: Stream) -> None:
    """Write report and export anew, and print what the newest month was worth."""
    assert model.record is not None
    index, month = stream.num_megabatches - 1, model.record.months[-1]
    stage = model.run.read_stage(index - month.first)
    assert stage is not None
    new = model.root / f".{EXPORT}.new"
    shutil.rmtree(new, ignore_errors=True)
    calls = {
        "fairseq_alma.cli.report:main": [str(model.root / RUN), "--out", str(model.root / REPORT)],
        "fairseq_alma.cli.export:main": [str(stage_predictor(model.run, stage)), "--out", str(new)],
    }
    calls["fairseq_alma.cli.export:main"] += ["--stream", str(model.root / STREAM)]
    for function, words in calls.items():
        call(function, words, log=model.root / LOG)
    shutil.rmtree(model.root / EXPORT, ignore_errors=True)
    new.rename(model.root / EXPORT)
    for line in _describe(model, stream, index):
        print_line(line, sys.stdout)


def _describe(model: Model, stream: Stream, index: int) -> Iterator[str]:
    """Yield the lines that a month ends with."""
    assert model.record is not None
    months, month = model.record.months, model.record.months[index]
    before, new = months[index - 1] if index else None, stream.megabatch(index)
    known = list(before.months) if before else []
    yield f"month {index + 1} of {model.root}: {new.num_documents:,} documents, {new.num_bytes:,} bytes to learn from"
    yield _compared("everything so far", _mean([*known, month.before]), _mean(month.months))
    yield _compared("new month", month.before, month.months[index])
    yield _compared("first month's test", before.test if before else None, month.test)
    old = _mean(known), _mean(month.months[: len(known)])
    if old[0] is not None and old[1] is not None and old[1] > WORSE * old[0]:
        yield (
            f"warning: old text is predicted {100 * (old[1] / old[0] - 1):.1f} % worse than before this month; "
            "alma-update MODEL --redo --budget R trains the month again with more passes"
        )
    how = {"begin": "a new model", "restart": "a larger model begun anew", "continue": "the model continues"}
    action, passes = month.step
    text = "its text" if action == "continue" else "all text so far"
    yield f"training: {how[action]}, {passes:.2g} passes through {text} (drawn from all months)"
    tokens = sum(stream.megabatch(t).num_tokens for t in range(index + 1))
    yield f"model: {month.params:,} parameters, {tokens:,} tokens so far"
    yield f"time: {format_duration(month.seconds)}"
    stage = model.run.read_stage(index - month.first)
    assert stage is not None
    text = call("fairseq_alma.cli.update:sample", stage_predictor(model.run, stage), model.root / STREAM)
    yield f"text: {printable(' '.join(text.split()))}"
    yield f"report: {model.root / REPORT / 'index.html'}"
    yield f"model for transformers: {model.root / EXPORT}"


def _mean(values: Sequence[Optional[float]]) -> Optional[float]:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _compared(what: str, before: Optional[float], after: Optional[float]) -> str:
    if after is None:
        return f"{what}: too little text to hold any out"
    if before is None:
        return f"{what}: {after:.3f} bits per byte"
    change = 100 * (1 - after / before)
    how = "better" if change >= 0 else "worse"
    return f"{what}: {before:.3f} bits per byte before, {after:.3f} after ({abs(change):.1f} % {how})"


def sample(checkpoint: Path, stream: Path) -> str:
    """Return a text that a model generates."""
    from fairseq_alma.text.loaded_model import load_model

    return load_model(checkpoint, stream).generate("", max_new_tokens=SAMPLE_TOKENS, seed=1)


def _sources(inputs: Sequence[str], model: Path, options: UpdateOptions) -> list[Source]:
    """Return the files of a month; refuse what can be read only once."""
    for given in inputs:
        if not (Path(given).is_file() or Path(given).is_dir()):
            raise AlmaError(f"{given}: no such file or folder; give the files or folders of one month")
    form = None if options.format in (None, "auto") else options.format
    return find_sources(inputs, form, options.field or "text", model, model)


def _month_of(stream: Stream, sources: Sequence[Source]) -> Optional[int]:
    """Return the month, from 0, that has these very files; None: it is a new one."""
    found = sorted(file_sha256(Path(source.path)) for source in sources)
    for number, entry in enumerate(stream.history):
        if sorted(each.get("sha256", "") for each in entry["inputs"]) == found:
            return number
    return None


def _refuse_another_language(model: Model, stream: Stream, sources: Sequence[Source], options: UpdateOptions) -> None:
    """Refuse a month whose bytes the stream's tokenizer cuts into many more tokens."""
    if options.another_language:
        return
    blocks = [block for source in sources for block in itertools.islice(FilePart(source).blocks(), 1)]
    texts = [text for block in blocks for text in documents_of(block)[:SAMPLED_DOCUMENTS]]
    tokens = sum(map(len, StreamTokenizer.open(stream.root).encode_batch(texts))) + len(texts)
    found = sum(len(text.encode()) for text in texts) / max(1, tokens)
    first = stream.megabatch(0)
    usual = first.num_bytes / max(1, first.num_tokens)
    if texts and found < LEAST_OF_USUAL * usual:
        raise AlmaError(
            f"{sources[0].label}: {found:.2f} bytes per token, the first month of {model.root} has {usual:.2f}: "
            "another language or encoding; give other text, or --another-language to learn from it"
        )


if __name__ == "__main__":
    sys.exit(main(None))
