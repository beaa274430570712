"""``--then-evaluate``: run a shell command after each stage, and read metrics from the last line of the output."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Callable, Mapping, Sequence

import msgspec

from fairseq_alma.errors import AlmaError, printable
from fairseq_alma.learners.learner import StagePlan
from fairseq_alma.runs.loop import StageWork
from fairseq_alma.runs.run_folder import Evaluation, RunFolder
from fairseq_alma.runs.study import RunRequest
from fairseq_alma.terminal import end_processes, last_line, start_process

_PLACE = re.compile(r"(?<!\$)\{(checkpoint|stage|arrival|run|stream)\}")


def evaluation_command(request: RunRequest, checkpoints: Sequence[Path], folder: RunFolder, plan: StagePlan) -> str:
    """Return the shell command for a stage; quoted values replace the placeholders such as ``{checkpoint}``.

    ``checkpoints`` are evaluated after the stage; several for an ensemble of image models.
    """
    values: dict[str, Sequence[object]] = {
        "checkpoint": checkpoints,
        "stage": [plan.stage.index],
        "arrival": [plan.stage.arrivals[-1]],
        "run": [folder.root],
        "stream": [request.stream],
    }
    return _PLACE.sub(lambda place: shlex.join(map(str, values[place[1]])), str(request.then_evaluate))


def evaluate(
    request: RunRequest, predictors: Callable[[RunFolder, StagePlan], Sequence[Path]], work: StageWork
) -> Mapping[str, object]:
    """Run the command of ``--then-evaluate``, if given, and return the metrics for stage.json.

    Args:
        request: options of ``alma-stream``.
        predictors: function that returns the checkpoints to evaluate after a stage.
        work: complete stage.

    Raises:
        AlmaError: the command fails or prints no metrics.
    """
    folder, plan = work.folder, work.plan
    if request.then_evaluate is None:
        return {}
    work.display.show_activity(plan, "evaluating")
    log = folder.stage_folder(plan.stage.index) / "evaluation.log"
    words = ["sh", "-c", evaluation_command(request, predictors(folder, plan), folder, plan)]
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
    try:  # msgspec rejects NaN and infinite numbers
        record = msgspec.convert({"command": request.then_evaluate, "figures": msgspec.json.decode(line)}, Evaluation)
    except (msgspec.DecodeError, RecursionError) as error:
        raise AlmaError(
            f"{log}: expected a JSON object of finite numbers as the last line of the output of --then-evaluate, "
            f'such as {{"bits_per_byte": 2.01}}, found {printable(line[:80])!r}; fix the command and run '
            "alma-stream again (trained models are kept)"
        ) from error
    return {"evaluation": msgspec.to_builtins(record)}
