"""``--then-evaluate``: run a shell command after each stage, and read metrics from the last line of the output."""

import json
import math
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Mapping, Sequence

import msgspec

from fairseq_alma.errors import AlmaError, printable
from fairseq_alma.learners.learner import StagePlan
from fairseq_alma.runs.loop import StageWork
from fairseq_alma.runs.run_folder import Evaluation, RunFolder
from fairseq_alma.terminal import end_processes, last_line, start_process

_PLACE = re.compile(r"(?<!\$)\{(checkpoint|stage|arrival|run|stream)\}")


@dataclass(frozen=True)
class StageEvaluation:
    """Evaluation of stages with a shell command.

    Attributes:
        template: command of the user, with placeholders such as ``{checkpoint}``.
        stream: folder of the stream.
        predictors: function that returns the checkpoints to evaluate after a stage; several for an image ensemble.
    """

    template: str
    stream: Path
    predictors: Callable[[RunFolder, StagePlan], Sequence[Path]]

    def command(self, folder: RunFolder, plan: StagePlan) -> str:
        """Return the shell command for a stage; quoted values replace the placeholders."""
        values: dict[str, Sequence[object]] = {
            "checkpoint": self.predictors(folder, plan),
            "stage": [plan.stage.index],
            "arrival": [plan.stage.arrivals[-1]],
            "run": [folder.root],
            "stream": [self.stream],
        }
        return _PLACE.sub(lambda place: shlex.join(map(str, values[place[1]])), self.template)

    def run(self, work: StageWork) -> Mapping[str, object]:
        """Run the command; return the metrics for stage.json. Raises AlmaError if it fails or prints no metrics."""
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
        if status := child.returncode:
            raise AlmaError(f"{log}: --then-evaluate failed (exit status {status}); read the log and fix the command")
        line = last_line(output.decode(errors="replace"))
        try:
            record = msgspec.convert({"command": self.template, "figures": json.loads(line)}, Evaluation)
            if not all(map(math.isfinite, record.figures.values())):
                raise ValueError("expected finite numbers")
        except (ValueError, RecursionError) as error:
            raise AlmaError(
                f"{log}: expected a JSON object of finite numbers as the last line of the output of --then-evaluate, "
                f'such as {{"bits_per_byte": 2.01}}, found {printable(line[:80])!r}; fix the command and run '
                "alma-stream again (trained models are kept)"
            ) from error
        return {"evaluation": msgspec.to_builtins(record)}
