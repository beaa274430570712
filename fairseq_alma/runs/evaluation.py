"""``--then-evaluate``: a user's shell command after each stage's test; its last line is a JSON object of figures."""

import importlib.util
import json
import math
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Mapping, Optional, Sequence

import msgspec

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import StagePlan
from fairseq_alma.runs.loop import StageWork
from fairseq_alma.runs.records import Evaluation
from fairseq_alma.runs.run_folder import EVALUATED_FILE, EVALUATED_FOLDER, RunFolder
from fairseq_alma.runs.workers import end_processes, find_program, start_process
from fairseq_alma.terminal import last_line

FLAG = "--then-evaluate"
EXAMPLE = '{"bits_per_byte": 2.01}'
_PLACE = re.compile(r"(?<!\$)\{(checkpoint|export|stage|arrival|run|stream)\}")


@dataclass(frozen=True)
class StageEvaluation:
    """Evaluates stages by a command of the user.

    Attributes:
        template: the command, with places such as ``{export}``.
        stream: folder of the stream.
        predictor: returns the checkpoint that predicts after a stage, and the checkpoints to make it of, if any.
    """

    template: str
    stream: Path
    predictor: Callable[[RunFolder, StagePlan], tuple[Path, Sequence[Path]]]

    @classmethod
    def of(cls, template: Optional[str], stream: Path, predictor: Callable) -> "Optional[StageEvaluation]":
        """Return what evaluates stages; None where the user gave no command."""
        return None if template is None else cls(template, stream, predictor)

    def check(self, plans: Sequence[StagePlan]) -> None:
        """Raise ValueError or AlmaError, before anything runs, if the model cannot be given to the command."""
        ways = {plan.combine for plan in plans} - {"single", "probabilities"}
        for place in self._model_places() if ways else ():
            raise ValueError(f"{FLAG} with {{{place}}}: no checkpoint predicts by {ways.pop()}; leave --combine out")
        if self.exports and importlib.util.find_spec("safetensors") is None:
            raise AlmaError(f"{FLAG} with {{export}}: safetensors is not installed; pip install 'fairseq-alma[export]'")

    def commands(self, folder: RunFolder, plan: StagePlan) -> list[list[str]]:
        """Return the commands that evaluate a stage, in order: those that make the model's file, and the user's."""
        path, members = self.predictor(folder, plan)
        exported = folder.stage_folder(plan.stage.index) / EVALUATED_FOLDER
        commands = []
        if members and self._model_places():
            commands.append(["alma-ensemble", *map(str, members), "--out", str(path), "--force"])
        if self.exports:
            commands.append(["alma-export", str(path), "--out", str(exported), "--stream", str(self.stream)])
        values = {"checkpoint": path, "export": exported, "stage": plan.stage.index, "run": folder.root}
        values |= {"arrival": plan.stage.last_arrival, "stream": self.stream}
        return [*commands, ["sh", "-c", _PLACE.sub(lambda place: shlex.join([str(values[place[1]])]), self.template)]]

    def run(self, work: StageWork) -> Mapping[str, object]:
        """Evaluate a stage; return its part of ``stage.json``. Raises AlmaError if a command fails."""
        work.display.say(work.plan, "evaluating")
        here = work.folder.stage_folder(work.plan.stage.index)
        log, output = here / "evaluation.log", b""
        self._remove(here)
        try:
            for words in self.commands(work.folder, work.plan):
                with open(log, "ab") as errors:
                    program = find_program(words[0])
                    child = start_process([program, *words[1:]], stdout=subprocess.PIPE, stderr=errors)
                    try:
                        output, _ = child.communicate()
                    finally:
                        end_processes([child])
                    errors.write(output)
                if child.returncode:
                    raise AlmaError(f"{log}: {FLAG} failed ({words[0]}: exit status {child.returncode}); read the log")
            said = last_line(output.decode(errors="replace"))
            record = msgspec.convert({"command": self.template, "figures": json.loads(said)}, Evaluation)
            if not all(map(math.isfinite, record.figures.values())):
                raise ValueError("a number that is not finite")
            return {"evaluation": msgspec.to_builtins(record)}
        except (ValueError, RecursionError) as error:
            if isinstance(error, AlmaError):
                raise
            raise AlmaError(
                f"{log}: {FLAG} must print a JSON object of finite numbers such as {EXAMPLE} as its last line; the "
                "trained models are kept, and the same command resumes here"
            ) from error
        finally:
            self._remove(here)

    @property
    def exports(self) -> bool:
        """Whether the command takes an exported folder."""
        return "export" in self._model_places()

    def _model_places(self) -> set[str]:
        return {found[1] for found in _PLACE.finditer(self.template)} & {"checkpoint", "export"}

    @staticmethod
    def _remove(stage: Path) -> None:
        shutil.rmtree(stage / EVALUATED_FOLDER, ignore_errors=True)
        (stage / EVALUATED_FILE).unlink(missing_ok=True)
