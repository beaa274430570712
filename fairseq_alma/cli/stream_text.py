"""``alma-stream`` on streams of text: stock commands in processes of their own."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Optional, Sequence

from fairseq_alma.backends.text.text_backend import TextBackend
from fairseq_alma.backends.text.text_commands import TextCommands
from fairseq_alma.backends.text.train_options import TrainOptions
from fairseq_alma.data.stream import Stream
from fairseq_alma.learners.plan import StagePlan
from fairseq_alma.learners.strategy import LEARNERS
from fairseq_alma.runs.run_display import RunDisplay, describe_stage
from fairseq_alma.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from fairseq_alma.checkpoints.model_facts import ModelFacts


class TextJob:
    """What alma-stream does with text; see `stream.Job`.

    Args:
        parser: for errors in the options after ``--``.
        arguments: what stands before ``--``.
        words: what stands after it.
        stream: the data; None: a dry run does without.
    """

    unit = "word"
    recorded: tuple[str, ...] = (
        "wait",
        "replay",
        "drop_rest",
        "iid",
        "init",
        "num_members",
        "grow_schedule",
        "grow_method",
        "grow_select",
        "save_every",
        "validate",
        "keep_checkpoints",
    )

    def __init__(
        self,
        parser: argparse.ArgumentParser,
        arguments: argparse.Namespace,
        words: Sequence[str],
        stream: Optional[Stream],
    ) -> None:
        self.arguments, self.stream = arguments, stream
        try:
            self.options = TrainOptions(words, LEARNERS[arguments.learner].owned)
            if arguments.learner == "umix" and self.options.last("--arch") == ("alma_umix",):
                raise ValueError(
                    "--arch alma_umix after the --: give the members' architecture; --learner umix wraps it"
                )
            options = self.options if arguments.num_procs == 1 else self.options.shared(arguments.num_procs)
        except ValueError as error:
            parser.error(str(error))
        self.commands = TextCommands(
            stream=arguments.stream,
            folder=RunFolder(arguments.run),
            options=options if arguments.iid is None else options.lengthened(arguments.iid),
            wait=arguments.iid or arguments.wait,
            replay=arguments.replay,
            save_every=arguments.save_every,
            validate=arguments.validate,
            keep_checkpoints=arguments.keep_checkpoints,
            num_procs=arguments.num_procs,
        )

    def train_options(self) -> dict[str, Any]:
        """Return what run.json says of the options after ``--``."""
        return self.options.as_dict()

    def print_plan(self, plans: Sequence[StagePlan]) -> None:
        """Print the commands of the stages that were asked for."""
        arguments = self.arguments
        if arguments.iid is not None:
            print(f"# --iid {arguments.iid}: --max-update and --total-num-update are {arguments.iid} times those given")
        for plan in plans:
            if arguments.stage not in (None, plan.stage.index):
                continue
            chosen = self.commands.all_of(plan)
            if arguments.member is not None:
                training = plan.training_of(arguments.member)
                chosen = [self.commands.train(plan, training)] if training is not None else []
            if chosen:
                print(f"# {describe_stage(plan, len(plans))}")
            for each in chosen:
                print(each.shell())

    def check(self) -> None:
        """Leave the options to fairseq-train, whose message the log has."""

    def work(self) -> Callable[[StagePlan], float]:
        """Return how the trainings of two stages compare: --max-update ends them alike, epochs by their data."""
        assert self.stream is not None
        sizes = [self.stream.megabatch(t).num_words for t in range(self.stream.num_megabatches)]
        by_updates = self.commands.options.max_update
        return lambda plan: 1.0 if by_updates else sum(sizes[t] for t in plan.stage.megabatches)

    def backends(self, runs: Sequence[tuple[RunFolder, RunDisplay, Sequence[StagePlan]]]) -> list[TextBackend]:
        """Return what trains and tests."""
        assert self.stream is not None
        ((_, display, _),) = runs  # of the one seed
        return [TextBackend(self.commands, display, _describe, self.stream.words_per_token)]


def _describe(path: Path) -> "ModelFacts":
    # Imports torch, which takes seconds; a dry run needs none of it.
    from fairseq_alma.checkpoints.model_facts import describe_checkpoint

    return describe_checkpoint(path)
