"""``--then-evaluate``: run a shell command after each stage, and read a JSON object of numbers from its last line."""

import json
import math
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Mapping, Sequence

import msgspec

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import StagePlan
from fairseq_alma.runs.loop import StageWork
from fairseq_alma.runs.records import Evaluation
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.runs.workers import end_processes, start_process
from fairseq_alma.terminal import last_line

_PLACE = re.compile(r"(?<!\$)\{(checkpoint|stage|arrival|run|stream)\}")


@dataclass(frozen=True)
class StageEvaluation:
    """Evaluate stages with a shell command of the user that has placeholders such as ``{checkpoint}``.

    ``predictors`` returns the evaluated checkpoints of a stage: one, or several for an ensemble of image models.
    """

    template: str
    stream: Path
    predictors: Callable[[RunFolder, StagePlan], Sequence[Path]]

    def command(self, folder: RunFolder, plan: StagePlan) -> str:
        values: dict[str, Sequence[object]] = {
            "checkpoint": self.predictors(folder, plan),
            "stage": [plan.stage.index],
            "arrival": [plan.stage.arrivals[-1]],
            "run": [folder.root],
            "stream": [self.stream],
        }
        return _PLACE.sub(lambda place: shlex.join(map(str, values[place[1]])), self.template)

    def run(self, work: StageWork) -> Mapping[str, object]:
        """Evaluate a stage and return the entries for ``stage.json``. Raises AlmaError if the command fails."""
        work.display.show_activity(work.plan, "evaluating")
        log = work.folder.stage_folder(work.plan.stage.index) / "evaluation.log"
        words = ["sh", "-c", self.command(work.folder, work.plan)]
        with open(log, "ab") as file:
            child = start_process(words, stdout=subprocess.PIPE, stderr=file)
            try:
                output, _ = child.communicate()
            finally:
                end_processes([child])
            file.write(output)
        if child.returncode:
            raise AlmaError(f"{log}: --then-evaluate failed (exit status {child.returncode}); see the log")
        try:
            figures = json.loads(last_line(output.decode(errors="replace")))
            record = msgspec.convert({"command": self.template, "figures": figures}, Evaluation)
            if not all(map(math.isfinite, record.figures.values())):
                raise ValueError("a number is not finite")
        except (ValueError, RecursionError) as error:
            raise AlmaError(
                f"{log}: the last line of --then-evaluate must be a JSON object of finite numbers, such as "
                '{"bits_per_byte": 2.01}; fix the command and run alma-stream again, the trained models are kept'
            ) from error
        return {"evaluation": msgspec.to_builtins(record)}
