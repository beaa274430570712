"""Jobs of ``alma-stream`` on text from command lines, which are not run."""

from pathlib import Path
from typing import Sequence

from fairseq_alma.cli.stream import learner_options, read_arguments
from fairseq_alma.learners.learner import StagePlan
from fairseq_alma.runs.study import RunRequest
from fairseq_alma.text.helper import Command
from fairseq_alma.text.text_job import TextJob
from fairseq_alma.text.train_options import Recipe

TRAIN = ("--arch", "a", "--cpu", "--batch-size", "4", "--max-update", "1000")


def make_job(*own: str, words: Sequence[str] = TRAIN, run: Path = Path("R")) -> TextJob:
    """Return the job of some options before and after ``--``, without a stream."""
    argv = ["--stream", "S", "--run", str(run), *own, "--", *words]
    _, arguments, _, words = read_arguments(argv)
    learner, given = learner_options(arguments, "text")
    return TextJob(RunRequest.of(arguments, learner, given), None, Recipe([*words]))


def commands_of(job: TextJob, plan: StagePlan) -> list[Command]:
    """Return all commands of a stage."""
    return [command for step in job.steps(job.folder, plan) for command in step.commands()]
