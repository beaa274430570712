"""``alma-verify``: whether a stream, a run, a checkpoint or an exported folder is whole, and a run can go on.

Nothing is trained and nothing is written. Each look is the one that the command takes that would use the file.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence

from fairseq_alma.cli.entry import Parser, command
from fairseq_alma.data.ngrams import DEFAULT_NGRAM, measure_overlap
from fairseq_alma.data.stream import MANIFEST, Stream, StreamFile
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import read_json_object
from fairseq_alma.options import Options, operand, opt, utf8_path
from fairseq_alma.runs.lookup import EXPORT_OF_MODEL, RUN_OF_MODEL, next_of, stream_of_run
from fairseq_alma.runs.run_folder import RUN_RECORD, RunFolder
from fairseq_alma.runs.study import is_begun_on

EPILOG = """\
A line for each thing that was looked at, with what is wrong and what to do; exit status 0 only where all holds.

  stream     the manifest, and size and sha256 of every file that it lists; with --overlap how much of the test text
             stands in each mega-batch
  run        run.json, every stage.json, the stream's fingerprint, every checkpoint that is kept, and whether what the
             next stage starts from is among them; its stream too, where it is there
  checkpoint checksums, contents, weights that are finite and of the shapes that its options say
  export     sha256 of every file, options, weights, tokenizer
  model      a folder with run, stream and export in it: all of these

  alma-verify stream runs/sm my_model --json | jq 'select(.holds | not)'
"""


@dataclass(frozen=True)
class VerifyOptions(Options):
    """What is looked at, what else is measured, and how findings are printed."""

    paths: Sequence[Path] = operand("stream, run, checkpoint, or exported folder", "PATH", nargs="+", parse=utf8_path)
    overlap: bool = opt(False, "measure how much of a stream's test text stands in its mega-batches")
    json: bool = opt(False, "print a JSON object a line: path, holds, says; for monitoring")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        path: what.
        holds: whether it is as it should be.
        says: what was seen; where it does not hold, what is wrong and what to do.
    """

    path: str
    holds: bool
    says: str

    def __str__(self) -> str:
        """Return the line that is printed: messages of errors name their file first."""
        line = self.says if self.says.startswith(self.path) else f"{self.path}: {self.says}"
        return f"{'ok' if self.holds else 'WRONG'}  {line}"


def build_parser() -> Parser:
    """Return the command's parser."""
    said = "Check streams, runs, checkpoints and exported folders, without training or writing anything."
    return Parser.of("alma-verify", said, EPILOG, VerifyOptions)


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command."""
    options = VerifyOptions.read(build_parser().parse_intermixed_args(argv))
    all_hold = True
    for path in options.paths:
        for finding in verify(path, options.overlap):
            print(json.dumps(asdict(finding)) if options.json else finding, flush=True)
            all_hold &= finding.holds
    return 0 if all_hold else 1


def verify(path: Path, overlap: bool = False) -> Iterator[Finding]:
    """Look at a stream, a run (or the runs of several seeds), a checkpoint or an exported folder, whichever it is.

    Args:
        path: what to look at.
        overlap: measure how much of a stream's test text stands in its mega-batches too.
    """
    own = [each for each in (path, path / RUN_OF_MODEL) if (each / RUN_RECORD).exists()][:1]
    runs = own or sorted(each.parent for each in path.glob(f"seed-*/{RUN_RECORD}"))
    for run in runs:
        yield from _verify_run(RunFolder(run))
    if own == [path / RUN_OF_MODEL] and (exported := path / EXPORT_OF_MODEL).is_dir():
        yield _look(exported, _load_folder, exported)
    if runs:
        return
    if (path / MANIFEST).exists():
        yield from _verify_stream(path, overlap)
    elif path.is_file():
        yield _look(path, _read_checkpoint, path)
    elif (path / "config.json").exists():
        yield _look(path, _load_folder, path)
    else:
        yield Finding(str(path), False, "no stream, run, checkpoint or exported folder; give one")


def _look(path: Path, look: Callable[..., str], *arguments: Any) -> Finding:
    """Return what a look says, or the error that it ends with."""
    try:
        return Finding(str(path), True, look(*arguments))
    except AlmaError as error:
        return Finding(str(path), False, str(error))


def _read_checkpoint(path: Path) -> str:
    from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint  # torch, which takes seconds

    return f"a checkpoint of {read_checkpoint(path)['cfg']['model']['_name']}"


def _load_folder(path: Path) -> str:
    if read_json_object(path / "config.json", "export the model again").get("model_type") == "alma_lm":
        from fairseq_alma.exchange.load_model import load_model

        parameters = load_model(path).model.parameters()
    else:
        from fairseq_alma.images.image_classifier import load_exported_images

        parameters = load_exported_images(path)[0].parameters()
    return f"an exported model of {sum(each.numel() for each in parameters):,} parameters"


def _verify_stream(path: Path, overlap: bool = False) -> Iterator[Finding]:
    opened = _look(path / MANIFEST, lambda: f"{Stream.open(path).num_megabatches} mega-batches")
    yield opened
    if opened.holds:
        stream = Stream.open(path)
        is_whole = True
        for file in stream.files(split.name for split in stream.splits):
            found = _look(path / file.path, _verify_file, path, file)
            is_whole &= found.holds
            yield found
        if overlap and is_whole and stream.kind == "text":
            yield from _overlap(stream)


def _verify_file(root: Path, file: StreamFile) -> str:
    file.verify(root)
    return "size and sha256 of the manifest"


def _overlap(stream: Stream) -> Iterator[Finding]:
    """Say for each mega-batch of a stream that is whole how much of the test text stands in it."""
    num_documents = stream.split("test").num_documents
    size = stream.decontaminated or DEFAULT_NGRAM
    for name, found in measure_overlap(stream, size):
        says = (
            f"holds {found.share:.3%} of the test text's n-grams of {size} words; {found.num_equal:,} of "
            f"{num_documents:,} test documents word by word, {found.num_documents:,} share an n-gram"
        )
        yield Finding(str(stream.prefix(stream.split(name))), True, says)


def _verify_run(run: RunFolder) -> Iterator[Finding]:
    read = _look(run.root / RUN_RECORD, lambda: f"--learner {(run.read_run() or {})['learner']}")
    yield read
    if not read.holds:
        return
    record = run.read_run()
    assert record is not None
    stream = stream_of_run(run, record)
    same = _look(stream, _is_same_stream, run, record, stream)
    yield same
    if same.holds:
        yield from _verify_stream(stream)
    for stage in run.stages():
        yield _look(run.stage_folder(stage), _describe_stage, run, stage)
        for path in sorted(run.stage_folder(stage).rglob("*.pt")):
            yield _look(path, _read_checkpoint, path)
    yield _look(run.root, next_of, run, record)


def _is_same_stream(run: RunFolder, record: Mapping[str, Any], path: Path) -> str:
    """Say that a stream is the one that a run began with; raise AlmaError if it is not."""
    if not is_begun_on(record, Stream.open(path)):
        raise AlmaError(
            f"{run.root / RUN_RECORD}: begun on another stream than {path} is now (fingerprint "
            f"{record['stream']['fingerprint'][:12]}); bring that stream back, or begin another run"
        )
    return "the stream that the run began with"


def _describe_stage(run: RunFolder, stage: int) -> str:
    if run.read_stage(stage) is None:
        return "not complete; the same alma-stream command goes on with it"
    return "complete" if run.is_tidy(stage) else "complete; the next alma-stream command removes what is not needed"
