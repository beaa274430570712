"""``alma-update``: the monthly job. One folder holds stream, run, report and exported model; each call adds a month.

It only puts the other commands together: ``alma-prep-text`` (``--append``), ``alma-stream``, ``alma-report`` and
``alma-export``, each of which resumes or begins anew after a kill, and so does this. ``update.json`` has what no other
file tells: the options of the first call, and of each month the losses before and after its training.
"""

import argparse
import contextlib
import itertools
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Iterator, Mapping, Optional, Sequence

import msgspec
from msgspec import Meta, Struct

from data_prep.text.command import prepare
from data_prep.text.options import FORMATS, parse_options
from data_prep.text.documents import Source, documents_of
from data_prep.text.source import find_sources
from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.data.stream import MANIFEST, Split, Stream, file_sha256, holdout_name
from fairseq_alma.data.tokens import StreamTokenizer
from fairseq_alma.errors import AlmaError, printable
from fairseq_alma.files import (
    WorkFolder,
    as_record,
    locked,
    read_json_object,
    replace_folder,
    write_json_atomically,
)
from fairseq_alma.metrics import bits_per_byte
from fairseq_alma.options import Options, opt, real, utf8_path, utf8_word, whole
from fairseq_alma.runs.run_folder import RUN_RECORD, RunFolder, stage_predictor
from fairseq_alma.runs.study import read_size
from fairseq_alma.terminal import spell_duration, tell
from fairseq_alma.text.defaults import num_params
from fairseq_alma.text.process import run_logged
from fairseq_alma.text.text_steps import evaluation_of, loss_of

RECORD = "update.json"
STREAM, RUN, REPORT, EXPORT, LOG = "stream", "run", "report", "export", "update.log"
SHARES = ["--valid-bytes", "3%", "--test-bytes", "5%", "--holdout-bytes", "2%"]
"""What the first call holds out; the last of each month."""
LEAST_OF_USUAL = 0.7
"""Bytes for a token that a month may have at least, as a share of what the first month has."""
SAMPLED_DOCUMENTS = 200
SAMPLE_TOKENS = 40
_REMEDY = "restore it from a backup, or begin a new MODEL"
EPILOG = """\
The first call makes MODEL/ with stream/, run/, report/ and export/; every further one appends what it is given, trains
on it, tests on the fixed test set and on a held-out part of the new text, and writes report and export anew. Killed,
the same command goes on. Text is whatever alma-prep-text reads. What stands after -- goes to fairseq-train; only the
first call takes it.

  alma-update model 2026-01.txt.xz
  alma-update model 2026-02.jsonl
  alma-update model inbox/2026-03/
"""


@dataclass(frozen=True)
class UpdateOptions(Options):
    """What a call decides for its month; how text is read, and the model's own experts, for all of them."""

    size: Optional[int] = opt(
        None,
        "as alma-stream --size; in a later month the model grows to it by more experts, at most twice as many "
        "(default: by how much there is to read; later: as it is)",
        parse=read_size,
    )
    passes: Optional[float] = opt(
        None,
        "how often this month's text is read (default: 1; later: as in the first month)",
        range=real(0, 1000, above=True),
        metavar="P",
    )
    experts: Optional[int] = opt(
        None,
        "experts that the model begins with in every second layer (default: 1, dense)",
        range=whole(1, 10_000),
    )
    format: Optional[str] = opt(None, "as alma-prep-text --format, of every month", choices=FORMATS)
    field: Optional[str] = opt(None, "as alma-prep-text --field, of every month", parse=utf8_word, metavar="NAME")
    another_language: bool = opt(False, "take a month whose text the tokenizer does not suit; this call alone")

    def for_stream(self) -> list[str]:
        """Return the options of one month for alma-stream, but for its size."""
        return _words({"--passes": self.passes})

    def for_text(self) -> list[str]:
        """Return the options for alma-prep-text."""
        return _words({"--format": self.format, "--field": self.field})


def _words(given: Mapping[str, object]) -> list[str]:
    return [word for flag, value in given.items() if value is not None for word in (flag, str(value))]


class Month(Struct, omit_defaults=True):
    """What ``update.json`` says of a month: experts, options for alma-stream, bits per token on what is held out."""

    experts: int
    words: list[str] = []
    before: Optional[float] = None
    after: Optional[float] = None
    seconds: float = 0.0
    is_done: bool = False


class UpdateRecord(Struct):
    """``update.json``: options of the first call for alma-prep-text and for alma-stream, and the months."""

    kind: Annotated[str, Meta(pattern="^alma-update$")]
    text: list[str]
    words: list[str]
    months: list[Month]


@dataclass
class Model:
    """The folder of a model that is updated.

    Args:
        root: MODEL/.

    Attributes:
        record: ``update.json``; None: there is none yet.
    """

    root: Path
    record: Optional[UpdateRecord] = field(init=False)

    def __post_init__(self) -> None:
        self.record = None
        if (self.root / RECORD).exists():
            content = read_json_object(self.root / RECORD, _REMEDY)
            self.record = as_record(content, UpdateRecord, self.root / RECORD, _REMEDY)
            return
        others = [] if not self.root.is_dir() else [each.name for each in self.root.iterdir()]
        if self.root.is_file() or {name for name in others if not name.startswith(".")} - {STREAM, LOG}:
            raise AlmaError(
                f"{self.root}: not a folder of alma-update, there is no {RECORD} in it; give a new folder, or one that "
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

    def predictor(self, month: int) -> Path:
        """Return the checkpoint that is tested after a month."""
        record = self.run.read_stage(month)
        assert record is not None, month
        return stage_predictor(self.run, record)

    @contextlib.contextmanager
    def logged(self) -> Iterator[None]:
        """Let what commands print go to ``update.log``; their live line, notes and errors stay on standard error."""
        with open(self.root / LOG, "a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
            yield


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = Parser.of(
        "alma-update",
        "Make a language model of text, or teach it the text of one more month.",
        EPILOG,
        usage="alma-update MODEL NEW_TEXT... [options] [-- fairseq-train options]",
    )
    parser.add_argument("model", type=utf8_path, metavar="MODEL", help="folder of the model; made if it is not there")
    parser.add_argument("inputs", nargs="+", metavar="NEW_TEXT", help="files or folders: one month")
    UpdateOptions.add_to(parser.add_argument_group("of the first call"))
    return parser


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run ``alma-update``."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    arguments = build_parser().parse_args(words[:cut])
    options = UpdateOptions.read(arguments)
    sources = _sources(arguments.inputs, arguments.model, options)
    is_new = not arguments.model.exists()
    try:
        Model(arguments.model)  # what cannot be shows before anything is written
        with locked(arguments.model / ".lock", f"{arguments.model}", who="alma-update"):
            return _update(Model(arguments.model), sources, arguments.inputs, options, words[cut + 1 :])
    finally:
        if is_new and arguments.model.is_dir():
            _remove_if_empty(arguments.model)


def _update(
    model: Model, sources: Sequence[Source], inputs: Sequence[str], options: UpdateOptions, words: Sequence[str]
) -> int:
    """Add a month, or finish one; return the exit status."""
    started, text = time.monotonic(), options.for_text()
    _refuse_other_options(model, [*text, *words])
    stream = model.stream()
    seen = None if stream is None else _month_of(stream, sources)
    if seen is not None:  # nothing will be prepared
        WorkFolder(model.root / STREAM, "", "alma-prep-text").sweep()
    if stream is not None and model.record is not None:
        is_last = seen == stream.num_megabatches - 1
        if _finish(model, stream, options if is_last else UpdateOptions(), started) and seen is not None:
            return 0
        if seen is not None:
            tell(f"{model.root}: month {seen + 1} has this text already; nothing to do", sys.stdout)
            return 0
        _experts_of(model, options)  # a size that cannot be shows before anything is written
        _refuse_another_language(model, stream, sources, options)
    begins = model.record is None
    with model.logged():
        out = ["--out", str(model.root / STREAM), "--megabatches", "1"]
        how = [*text, *SHARES, "--vocab-size", "auto"] if model.record is None else [*model.record.text, "--append"]
        try:
            prepare(parse_options([*inputs, *out, *how]))
        except AlmaError as error:
            if not str(error).startswith(("--megabatches", "--valid-bytes", "--test-bytes", "--holdout-bytes")):
                raise
            raise AlmaError(f"{inputs[0]}: too little text, or too few documents, for a month ({error})") from error
    stream = model.stream()
    assert stream is not None
    if begins:
        model.record = UpdateRecord("alma-update", text, [*words], [])
        model.save()
    try:
        _finish(model, stream, options, started)
    except SystemExit:
        if begins and not (model.root / RUN / RUN_RECORD).exists():  # such as hours that are too short
            shutil.rmtree(model.root / STREAM)
            (model.root / RECORD).unlink(missing_ok=True)
        raise
    return 0


def _finish(model: Model, stream: Stream, options: UpdateOptions, started: float) -> bool:
    """Train on a month that is in the stream and not done, and say what it was worth; tell whether there was one."""
    assert model.record is not None
    month, months = stream.num_megabatches - 1, model.record.months
    if len(months) <= month:
        size = _words({"--size": options.size}) if month == 0 else []
        months.append(Month(_experts_of(model, options), [*size, *options.for_stream()]))
        model.save()
    if months[month].is_done:
        return False
    if month and months[month].before is None:
        tell(f"{model.root}: testing on month {month + 1} before it is learned", sys.stderr)
        months[month].before = _loss_on(model, month, model.predictor(month - 1))
        model.save()
    _train(model, months)
    after = _loss_on(model, month, model.predictor(month))
    _report(model)
    _export(model, month)
    months[month].after, months[month].is_done = after, True
    months[month].seconds = round(time.monotonic() - started, 1)
    model.save()
    for line in _describe(model, stream, month):
        tell(line, sys.stdout)
    return True


def _experts_of(model: Model, options: UpdateOptions) -> int:
    """Return the experts of a new month: those of the month before, or as many more as a size asks for."""
    assert model.record is not None
    months = model.record.months
    if not months:
        return options.experts or 1
    now = months[-1].experts
    if options.size is None:
        return now
    stream, chosen = model.stream(), (model.run.read_run() or {}).get("train_options", {})
    assert stream is not None and stream.tokenizer is not None
    width, layers = (int(chosen[f"--decoder-{name}"]) for name in ("embed-dim", "layers"))
    vocab_size = stream.tokenizer.vocab_size
    possible = {count: num_params(width, layers, vocab_size, count) for count in range(now, 2 * now + 1)}
    if not possible[now] <= options.size <= 1.1 * possible[2 * now]:
        raise AlmaError(
            f"--size {options.size:,}: the model has {possible[now]:,} parameters, and from one month to the next "
            f"it can grow to {possible[2 * now]:,}; give a size between these"
        )
    return min(possible, key=lambda count: abs(possible[count] - (options.size or 0)))


def _train(model: Model, months: Sequence[Month]) -> None:
    from fairseq_alma.cli.stream import main as stream_main

    assert model.record is not None
    begins = not (model.root / RUN / RUN_RECORD).exists()
    schedule = ",".join(str(month.experts) for month in months)
    argv = ["--stream", str(model.root / STREAM), "--run", str(model.root / RUN), "--learner", "gmoe"]
    argv += ["--grow-method", "split", "--grow-schedule", schedule, *months[-1].words]
    argv += ["--", *model.record.words] if model.record.words else []
    with model.logged():
        if status := stream_main(argv):
            raise SystemExit(status)
    if begins:
        for line in ((model.run.read_run() or {}).get("recipe") or {}).get("lines", ()):
            tell(line, sys.stdout)


def _report(model: Model) -> None:
    from fairseq_alma.cli.report import main as report_main

    with model.logged():
        if report_main([str(model.root / RUN), "--out", str(model.root / REPORT)]):
            raise AlmaError(f"{model.root / REPORT}: not written, see above; the same command goes on")


def _export(model: Model, month: int) -> None:
    """Export what is tested after a month, in place of what is there."""
    from fairseq_alma.exchange.export import export_model

    new = model.root / f".{EXPORT}-new"
    shutil.rmtree(new, ignore_errors=True)
    export_model(model.predictor(month), new, model.root / STREAM)
    replace_folder(new, model.root / EXPORT)


def _loss_on(model: Model, month: int, path: Path) -> float:
    """Return the loss of a checkpoint on what is held out of a month, bits per token."""
    words = (model.run.read_run() or {}).get("train_options", {})
    options = [("--cpu", ())] if "--cpu" in words else []
    batch = words.get("--batch-size")
    log = model.root / "evaluation.log"
    split = holdout_name(month)
    test = evaluation_of(model.root / STREAM, path, split, [*options, *([("--batch-size", (batch,))] if batch else [])])
    return loss_of(lambda watch: run_logged(test, log, watch), split, log)


def _describe(model: Model, stream: Stream, month: int) -> Iterator[str]:
    """Say what a month was worth."""
    assert model.record is not None
    done, stage = model.record.months[month], model.run.read_stage(month)
    assert stage is not None and done.after is not None
    new, history = stream.megabatch(month), stream.history[-1]
    held_out, test = stream.holdout(month), stream.split("test")
    left_out = f"{history.get('num_duplicates', 0):,} duplicates, {history.get('num_contaminated', 0):,} documents"
    before = model.run.read_stage(month - 1) if month else None
    after_new, after_test = _bits(done.after, held_out), _bits(stage["test"]["loss"], test)
    yield f"month {month + 1} of {model.root}: {new.num_documents:,} documents, {new.num_words:,} words to learn from"
    yield f"left out: {left_out} with words of the test set; held out: {held_out.num_words:,} words"
    if before is not None and done.before is not None:
        before_new, before_test = _bits(done.before, held_out), _bits(before["test"]["loss"], test)
        gain, drift = 100 * (1 - after_new / before_new), 100 * (before_new / before_test - 1)
        yield f"new text: {before_new:.3f} bits per byte on arrival, {after_new:.3f} after: {_better(gain)}"
        yield (
            f"test set: {before_test:.3f} bits per byte before, {after_test:.3f} after: "
            f"{_better(100 * (1 - after_test / before_test))}"
        )
        than = "harder" if drift > 0 else "easier"
        yield f"drift: on arrival the new text was {abs(drift):.1f} % {than} than the test set"
    else:
        yield f"new text: {after_new:.3f} bits per byte on what is held out of it"
        yield f"test set: {after_test:.3f} bits per byte, perplexity {stage['test']['ppl']:.1f}"
    words = sum(stream.megabatch(t).num_words for t in range(month + 1))
    updates = f"{stage['num_updates']:,} updates this month"
    grown = f"{stage['num_params']:,} parameters, {stage['num_experts']} experts in every second layer"
    yield f"model: {grown}, {words:,} words so far, {updates}"
    yield f"time: {spell_duration(done.seconds)}, of it {spell_duration(stage['wall_seconds'])} of training and tests"
    yield f"text: {_sample(model, month)}"
    yield f"report: {model.root / REPORT / 'index.html'}"
    yield f"model for transformers: {model.root / EXPORT}"


def _better(percent: float) -> str:
    return f"{abs(percent):.1f} % {'better' if percent >= 0 else 'worse'}"


def _bits(loss: float, split: Split) -> float:
    return bits_per_byte(loss, split.num_tokens, split.num_bytes) or loss


def _sample(model: Model, month: int) -> str:
    from fairseq_alma.text.loaded_model import load_model

    text = load_model(model.predictor(month), model.root / STREAM).generate("", max_new_tokens=SAMPLE_TOKENS, seed=1)
    return printable(" ".join(text.split()))


def _sources(inputs: Sequence[str], model: Path, options: UpdateOptions) -> list[Source]:
    """Return the files of a month; refuse what can be read but once."""
    for given in inputs:
        if not Path(given).exists() or not (Path(given).is_file() or Path(given).is_dir()):
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


def _refuse_other_options(model: Model, given: Sequence[str]) -> None:
    if model.record is None or not given:
        return
    before = [*model.record.text, *model.record.words]
    if [*given] != before:
        first = " ".join(before) or "none"
        raise AlmaError(
            f"{model.root / RECORD}: the model was begun with other options ({first} then, {' '.join(given)} now); "
            "leave them out, or begin another MODEL"
        )


def _refuse_another_language(model: Model, stream: Stream, sources: Sequence[Source], options: UpdateOptions) -> None:
    """Refuse a month whose bytes the stream's tokenizer cuts into many more tokens."""
    if options.another_language:
        return
    blocks = [block for source in sources for block, _ in itertools.islice(source.blocks(), 1)]
    texts = [text for block in blocks for text in documents_of(block)[:SAMPLED_DOCUMENTS]]
    tokens = sum(map(len, StreamTokenizer.open(stream.root).encode_batch(texts))) + len(texts)
    found = sum(len(text.encode()) for text in texts) / max(1, tokens)
    first = stream.megabatch(0)
    usual = first.num_bytes / max(1, first.num_tokens)
    if texts and found < LEAST_OF_USUAL * usual:
        raise AlmaError(
            f"{sources[0].label}: {found:.2f} bytes for a token, the first month of {model.root} has {usual:.2f}: "
            "another language or encoding; give other text, or --another-language to learn from it"
        )


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder in which a first call came to nothing."""
    if {each.name for each in folder.iterdir()} <= {".lock", LOG}:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main(None))
