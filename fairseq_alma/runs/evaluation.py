"""``--then-evaluate``: a command of the user's after each stage's test, and the figures that it prints.

The stage's model is given to it as a checkpoint, or as a folder that ``alma-export`` writes for it and that is removed
when it has ended. Its figures are kept beside the stage until its record is there: it runs once for each stage.
"""

import contextlib
import importlib.util
import io
import json
import math
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Callable, Mapping, Optional, Sequence

import msgspec

from fairseq_alma.errors import AlmaError
from fairseq_alma.files import as_record, read_json_object, write_json_atomically
from fairseq_alma.learners.learner import StagePlan
from fairseq_alma.runs.loop import StageWork
from fairseq_alma.runs.records import Evaluation
from fairseq_alma.runs.run_folder import EVALUATED_FOLDER, EVALUATION_RECORD, RunFolder
from fairseq_alma.runs.workers import describe_status, end_processes, find_program, start_process
from fairseq_alma.terminal import last_line, shell_words

FLAG = "--then-evaluate"
PLACES = ("checkpoint", "export", "stage", "arrival", "run", "stream")
LARGEST = 1 << 16  # bytes at the end of what a command prints, in which its last line stands
MAX_REASON = 400
EXAMPLE = '{"bits_per_byte": 2.01}'
_PLACE = re.compile(r"(?<!\$)\{(" + "|".join(PLACES) + r")\}")
_MODEL_PLACES = ("checkpoint", "export")

Join = Callable[[RunFolder, StagePlan], tuple[Path, Sequence[Path]]]
"""Returns the checkpoint that stands for what predicts after a stage, and the checkpoints to make it of, if any."""


@dataclass(frozen=True)
class StageEvaluation:
    """Evaluates stages by a command of the user's.

    Attributes:
        template: the command, for a shell, with places such as ``{export}``.
        stream: folder of the stream.
        predictor: see `Join`.
    """

    template: str
    stream: Path
    predictor: Join

    @classmethod
    def of(cls, template: Optional[str], stream: Path, predictor: Join) -> "Optional[StageEvaluation]":
        """Return what evaluates stages; None where the user gave no command."""
        return None if template is None else cls(template, stream, predictor)

    def check(self, plans: Sequence[StagePlan]) -> None:
        """Refuse a command that cannot run, before anything does.

        Raises:
            ValueError: it is empty, no shell reads it, or what it wants of the model cannot be had.
            AlmaError: what exports a model is not installed.
        """
        if not self.template.strip():
            raise ValueError(f"{FLAG}: an empty command found; give one that prints figures, such as {EXAMPLE}")
        shell = [find_program("sh"), "-n", "-c", _PLACE.sub("x", self.template)]
        read = subprocess.run(shell, capture_output=True, text=True, errors="replace", check=False)
        if read.returncode:
            raise ValueError(f"{FLAG}: not a command that a shell reads: {last_line(read.stderr)}")
        ways = {plan.combine for plan in plans} - {"single", "probabilities"}
        wanted = [f"{{{place}}}" for place in _MODEL_PLACES if self._has(place)]
        if wanted and ways:
            raise ValueError(
                f"{FLAG} with {wanted[0]}: no checkpoint predicts by {', '.join(sorted(ways))}; leave --combine out, "
                f"or {wanted[0]}"
            )
        if self._has("export") and importlib.util.find_spec("safetensors") is None:
            raise AlmaError(f"{FLAG} with {{export}}: safetensors is not installed; pip install 'fairseq-alma[export]'")

    def commands(self, folder: RunFolder, plan: StagePlan) -> list[list[str]]:
        """Return the commands that evaluate a stage, in order: those that make what it asks for, and its own."""
        here = folder.stage_folder(plan.stage.index)
        path, members = self.predictor(folder, plan)
        commands = []
        if members and any(map(self._has, _MODEL_PLACES)):
            commands.append(["alma-ensemble", *map(str, members), "--out", str(path), "--force"])
        exported = here / EVALUATED_FOLDER
        if self._has("export"):
            words = [str(path), "--out", str(exported), "--stream", str(self.stream)]
            commands.append(["alma-export", *words])
        known = (path, exported, plan.stage.index, plan.stage.last_arrival, folder.root, self.stream)
        values = {place: shell_words([_no_option(str(value))]) for place, value in zip(PLACES, known, strict=True)}
        return [*commands, ["sh", "-c", _PLACE.sub(lambda place: values[place[1]], self.template)]]

    def run(self, work: StageWork) -> Mapping[str, object]:
        """Evaluate a stage, unless a launch before has; return what its record says of it.

        Raises:
            AlmaError: the command failed, or printed no figures.
        """
        here = work.folder.stage_folder(work.plan.stage.index)
        kept = here / EVALUATION_RECORD
        with contextlib.suppress(AlmaError, FileNotFoundError):
            before = as_record(read_json_object(kept, ""), Evaluation, kept, "")
            if before.command == self.template:
                return {"evaluation": msgspec.to_builtins(before)}
        work.display.say(work.plan, "evaluating")
        work.folder.require_in_place()
        work.folder.claim_evaluated(work.plan.stage.index)
        before_it = _checkpoints(here)
        try:
            figures = self._figures(self.commands(work.folder, work.plan), here / "evaluation.log")
        finally:
            work.folder.remove_evaluated(work.plan.stage.index)
        _require_untouched(here, before_it)
        record = {"command": self.template, "figures": figures}
        work.folder.require_in_place()
        write_json_atomically(kept, record)
        return {"evaluation": record}

    def _figures(self, commands: Sequence[Sequence[str]], log: Path) -> dict[str, float]:
        remedy = "the trained models are kept, and the same command resumes here"
        said = ""
        for words in commands:
            status, said = _run(words, log)
            if status:
                what = FLAG if words[0] == "sh" else words[0]
                raise AlmaError(f"{log}: {what} failed ({describe_status(status)}): {said[:MAX_REASON]}; {remedy}")
        try:
            figures = msgspec.convert({"command": FLAG, "figures": json.loads(said)}, Evaluation).figures
            if not all(map(math.isfinite, figures.values())):  # JSON has no such numbers, and no table a place for them
                raise ValueError("a number that is not finite")
            return figures
        except (ValueError, RecursionError) as error:
            found = f"{said[:60]!r} found"
            raise AlmaError(
                f"{log}: {FLAG} must print figures as its last line, a JSON object such as {EXAMPLE}, of "
                f"finite numbers; {found}; {remedy}"
            ) from error

    def _has(self, place: str) -> bool:
        return any(found[1] == place for found in _PLACE.finditer(self.template))


def _no_option(text: str) -> str:
    """Return a name that no command takes for an option."""
    return f"./{text}" if text.startswith("-") else text


def _checkpoints(stage: Path) -> dict[Path, tuple[int, int, int]]:
    """Return what tells a stage's checkpoints from others in their place: inode, size, and time of the last change."""
    stats = {path: path.stat() for path in stage.rglob("*.pt") if path.is_file()}
    return {path: (found.st_ino, found.st_size, found.st_mtime_ns) for path, found in stats.items()}


def _require_untouched(stage: Path, before: Mapping[Path, tuple[int, int, int]]) -> None:
    """Raise AlmaError if a checkpoint is not what it was: what the stage's record is to say would not be there."""
    now = _checkpoints(stage)
    for path, found in before.items():
        if now.get(path) != found:
            raise AlmaError(
                f"{path}: {FLAG} has {'changed' if path in now else 'removed'} it, so the stage is not complete; let "
                f"the command work on a copy, remove {stage}, and the same alma-stream command trains that stage again"
            )


def _run(words: Sequence[str], log: Path) -> tuple[int, str]:
    """Run a command to its end; what it prints is added to a log.

    Returns:
        Its status, and the last line that it printed on standard output, or if it failed the last of all.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as errors, tempfile.TemporaryFile() as output:
        errors.write(f"$ {shell_words(words)}\n".encode())
        errors.flush()
        begin = errors.tell()
        child = start_process([find_program(words[0]), *words[1:]], stdout=output, stderr=errors)
        try:
            status = child.wait()
        finally:
            end_processes([child])
        said = last_line(_end_of(output))
        if status:
            with open(log, "rb") as written:
                said = last_line(_end_of(written, begin)) or said or "it printed nothing"
        output.seek(0)
        shutil.copyfileobj(output, errors)
    return status, said


def _end_of(file: BinaryIO, begin: int = 0) -> str:
    """Return the end of what a file has from a place on."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(begin, size - LARGEST))
    return file.read().decode(errors="replace")
