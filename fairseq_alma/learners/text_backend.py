"""Trains and tests language models through the stock commands, each in a process of its own."""

import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.learners import checkpoints
from fairseq_alma.learners.plan import Model, StagePlan, Training
from fairseq_alma.learners.process import run_logged
from fairseq_alma.learners.progress import TrainingProgress, describe_stage
from fairseq_alma.learners.text_commands import TEST_SPLITS, TextCommands

if TYPE_CHECKING:
    from fairseq_alma.growth.model_facts import ModelFacts

_EVAL_RESULT = re.compile(r"Loss \(base 2\): (\S+), Perplexity: (\S+)")


class TextBackend:
    """The back end of ``alma-stream`` for streams of text.

    Args:
        commands: builds the command lines.
        num_stages: of the run, for messages.
        describe: computes the facts of a checkpoint; given from outside because it needs torch.
    """

    def __init__(self, commands: TextCommands, num_stages: int, describe: "Callable[[Path], ModelFacts]") -> None:
        self.commands = commands
        self.folder = commands.folder
        self.num_stages = num_stages
        self.describe = describe

    def train(self, plan: StagePlan, lock: int) -> Mapping[str, Any]:
        """Train the stage's models one after the other; see `loop.Backend`."""
        done = [self._train_one(plan, training, lock) for training in plan.trainings]
        facts = [self.describe(self.commands.checkpoint(training.model)) for training in plan.trainings]
        return {
            "num_updates": sum(progress.num_updates for progress in done),
            "train_tokens": sum(progress.train_tokens for progress in done),
            "train_flops": sum(
                progress.train_tokens * fact.train_flops_per_token for progress, fact in zip(done, facts, strict=True)
            ),
        }

    def test(self, plan: StagePlan, lock: int) -> Mapping[str, Any]:
        """Test what predicts after the stage; see `loop.Backend`."""
        facts = [self.describe(self.commands.checkpoint(model)) for model in plan.predictors]
        return {
            "num_params": sum(fact.num_params for fact in facts),
            "num_experts": max(fact.num_experts for fact in facts),
            "num_members": len(facts),
            "test_flops_per_token": sum(fact.test_flops_per_token for fact in facts),
            **{split: self._test_one(plan, split, lock) for split in TEST_SPLITS},
        }

    def keep_only(self, stage: int, needed: Sequence[Model]) -> None:
        """Remove checkpoints that neither a later stage nor the report needs; see `loop.Backend`."""
        for index in range(stage + 1):
            for folder in sorted(self.folder.stage_folder(index).glob("member-*")):
                model = Model(index, int(folder.name.removeprefix("member-")))
                if model in needed:
                    checkpoints.keep_only_last(folder)
                    checkpoints.drop_optimizer_state(folder / checkpoints.LAST)
                else:
                    checkpoints.remove_all(folder)

    def _train_one(self, plan: StagePlan, training: Training, lock: int) -> checkpoints.Progress:
        folder = self.folder.model_folder(training.model)
        options = self.commands.options
        limits = options.max_update, options.max_epoch
        last = checkpoints.repair_last(folder)
        before = checkpoints.read_progress(last) if last else checkpoints.Progress(0, 0, 0)
        if before.has_reached(*limits):
            return before
        if training.start is not None and not self.commands.checkpoint(training.start).is_file():
            raise AlmaError(
                f"{self.commands.checkpoint(training.start)}: not there, and stage {plan.stage.index} starts from it; "
                f"remove {self.folder.stage_folder(training.start.stage)} to train that stage again"
            )
        log = self.folder.stage_folder(plan.stage.index) / f"train-member-{training.model.member}.log"
        title = describe_stage(plan, self.num_stages)
        if len(plan.trainings) > 1:
            title += f", member {training.model.member}"
        with TrainingProgress(title, options.max_update, before.num_updates) as progress:
            run_logged(self.commands.train(plan, training), log, progress.watch, keep_open=[lock])
        if not checkpoints.is_whole(folder / checkpoints.LAST):
            raise AlmaError(f"{log}: fairseq-train ended without a checkpoint; read the log")
        after = checkpoints.read_progress(folder / checkpoints.LAST)
        if not after.has_reached(*limits):
            raise AlmaError(
                f"{log}: fairseq-train ended after {after.num_updates} updates and {after.num_epochs} epochs, before "
                "--max-update or --max-epoch; read the log"
            )
        return after

    def _test_one(self, plan: StagePlan, split: str, lock: int) -> dict[str, float]:
        """Return loss (bits per token, 4 decimals as fairseq prints them) and perplexity."""
        log = self.folder.stage_folder(plan.stage.index) / f"{split}.log"
        if not sys.stderr.isatty():
            print(f"{describe_stage(plan, self.num_stages)}: testing on {split}", file=sys.stderr, flush=True)
        results = []

        def watch(line: str) -> None:
            if match := _EVAL_RESULT.search(line):
                results.append(float(match[1]))

        run_logged(self.commands.test(plan, split), log, watch, keep_open=[lock])
        if len(results) != 1:
            raise AlmaError(f"{log}: fairseq-eval-lm printed {len(results)} results, one is needed; read the log")
        if not math.isfinite(results[0]):
            raise AlmaError(
                f"{log}: the loss on {split} is {results[0]}, so the training diverged; start a new --run with a lower "
                "--lr, more --warmup-updates or --clip-norm"
            )
        return {"loss": results[0], "ppl": round(2 ** results[0], 4)}
