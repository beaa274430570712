"""Trains and tests language models through the stock commands, each in a process of its own."""

import contextlib
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping, Optional, Sequence

from msgspec import to_builtins

from fairseq_alma.checkpoints import LAST_CHECKPOINT
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import as_record, read_json_object, write_json_atomically
from fairseq_alma.learners.plan import ModelId, StagePlan, Training
from fairseq_alma.runs.loop import StageWork
from fairseq_alma.runs.predictor import BEST, BRANCH, ENSEMBLE_FILE
from fairseq_alma.runs.records import TextGrowth
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.text import stage_checkpoints
from fairseq_alma.text.fairseq_log import watch_fairseq
from fairseq_alma.text.process import Command, run_logged
from fairseq_alma.text.text_commands import (
    GROWN_FILE,
    GROWTH_RECORD,
    TEST_SPLITS,
    UP_TO_BRANCH,
    WHOLE,
    TextCommands,
)

if TYPE_CHECKING:
    from fairseq_alma.checkpoints.model_facts import ModelFacts

_EVAL_RESULT = re.compile(r"Loss \(base 2\): (\S+), Perplexity: (\S+)")


class TextBackend:
    """The back end of ``alma-stream`` for streams of text: one run at a time.

    Args:
        commands: builds the command lines.
        describe: computes the facts of a checkpoint; given from outside because it needs torch.
        words_per_token: of the stream, to show words per second.
    """

    def __init__(
        self, commands: TextCommands, describe: "Callable[[Path], ModelFacts]", words_per_token: float
    ) -> None:
        self.commands = commands
        self.folder = commands.folder
        self.describe = describe
        self.words_per_token = words_per_token

    def train(self, works: Sequence[StageWork]) -> list[Mapping[str, Any]]:
        """Train the stage's models one after the other; see `loop.Backend`."""
        return [self._train(work) for work in works]

    def _train(self, work: StageWork) -> Mapping[str, Any]:
        trained = [self._train_model(work, training, [work.lock]) for training in work.plan.trainings]
        done = [parts[-1] for parts in trained]
        tokens = [sum(_own_tokens(parts)) for parts in trained]
        facts = [self.describe(self.folder.checkpoint(training.model)) for training in work.plan.trainings]
        return {
            "num_updates": max(position.num_updates for position in done),
            "train_tokens": sum(tokens),
            "train_flops": sum(count * fact.train_flops_per_token for count, fact in zip(tokens, facts, strict=True)),
            **self._describe_anytime(work.plan.stage.index, done[0]),
        }

    def _describe_anytime(self, stage: int, done: stage_checkpoints.Progress) -> dict[str, Any]:
        """Return what stage.json says of how the stage began and of what is tested; nothing for the paper's way."""
        options = self.commands.anytime
        if not options.record():
            return {}
        described = {"first_update": done.first_update, "predicts_with": options.predicts_with}
        if options.rewarm == "one-schedule":
            described["peak_lr"] = self.commands.peak(stage)
        if options.branch_decay is not None:
            described["branch_updates"] = options.branch_updates(done.num_updates)
        return {"anytime": described}

    def train_members(self, work: StageWork, group: Sequence[Training], locks: Sequence[int]) -> None:
        """Train some models of a stage to their end, unless they are there; see `loop.Backend`."""
        for training in group:
            self._train_model(work, training, locks)

    def _train_model(
        self, work: StageWork, training: Training, locks: Sequence[int]
    ) -> list[stage_checkpoints.Progress]:
        """Train one model of a stage to its end, unless it is there, and return how far each part of that is."""
        self._forget_lost_branch(training.model)
        parts = [self._train_part(work, training, part, locks) for part in self.commands.parts]
        average = self.commands.predicting(training.model)
        if self.commands.anytime.predicts_with == "average" and not stage_checkpoints.is_sound(average):
            # Imports torch, which takes seconds; a finished run needs none of it.
            from fairseq_alma.checkpoints.training_state import write_average

            write_average(self.folder.checkpoint(training.model), average)  # as `TextCommands.average` does
        return parts

    def _train_part(
        self, work: StageWork, training: Training, part: str, locks: Sequence[int]
    ) -> stage_checkpoints.Progress:
        """Make one part of a training, unless it is there, and return how far that is."""
        plan, limits = work.plan, self._limits(part)
        folder = self.commands.save_folder(training.model, part)
        self._forget_lost_best(folder)
        last = stage_checkpoints.repair_last(folder)
        before = stage_checkpoints.read_progress(last) if last else stage_checkpoints.Progress(0, 0, 0)
        if last and before.has_reached(*limits):
            self._synchronise(folder)
            return before
        self._require_start(training)
        self._grow(work, training, locks)  # fairseq-train looks at the file again when it resumes
        log = self._log(plan, f"train-member-{training.model.member}" + ("-branch" if part == BRANCH else ""))
        first_update = self.commands.first_update(training, part)
        with work.display.training(plan, training, limits[0], before.num_updates) as progress:
            watch = watch_fairseq(progress, self.words_per_token, limits[1], first_update)
            self._launch(work, self._training(plan, training, part, before), log, watch, locks)
        return self._require_end(folder, log, limits)

    def _synchronise(self, folder: Path) -> None:
        """See to it that what a training ends with is on the disk, before any stage.json says that it is there."""
        stage_checkpoints.synchronise(folder / LAST_CHECKPOINT)
        if self.commands.anytime.best_checkpoint and (folder / BEST).is_file():
            stage_checkpoints.synchronise(folder / BEST)

    def _forget_lost_best(self, folder: Path) -> None:
        """Begin a training anew whose best checkpoint was cut off by a power failure: the last one does not have it."""
        best = folder / BEST
        if self.commands.anytime.best_checkpoint and best.is_file() and not stage_checkpoints.is_sound(best):
            stage_checkpoints.remove_all(folder)

    def _forget_lost_branch(self, model: ModelId) -> None:
        """Begin a training anew that is past the place where a copy had branched off, if that copy is not there."""
        if not self.commands.anytime.copies_branch:
            return
        last = stage_checkpoints.repair_last(self.folder.model_folder(model))
        if last is None:
            return
        copy = stage_checkpoints.repair_last(self.commands.branch_folder(model))
        done = copy is not None and stage_checkpoints.read_progress(copy).has_reached(*self._limits(BRANCH))
        split = self.commands.num_updates(UP_TO_BRANCH)
        if not done and split is not None and stage_checkpoints.read_progress(last).num_updates > split:
            stage_checkpoints.remove_all(self.commands.branch_folder(model))
            stage_checkpoints.remove_all(self.folder.model_folder(model))

    def _require_start(self, training: Training) -> None:
        """Raise AlmaError unless the weights that a training starts from are there."""
        if training.start is None:
            return
        if not (path := self.commands.begins_from(training.start)).is_file():
            raise AlmaError(
                f"{path}: not there, and stage {training.model.stage} starts from it; remove "
                f"{self.folder.stage_folder(training.start.stage)} to train that stage again"
            )

    def _grow(self, work: StageWork, training: Training, locks: Sequence[int]) -> None:
        """Add experts to what a training starts from, if it is to grow and has not. What is there is whole."""
        if training.growth is None or self.commands.grown(training.model).is_file():
            return
        self._require_start(training)
        growth = f"adding {training.growth.num_new} experts ({training.growth.method})"
        work.display.say(work.plan, growth, training)
        self._launch(work, self.commands.grow(training), self._log(work.plan, "grow"), _ignore, locks)

    def _launch(
        self, work: StageWork, command: Command, log: Path, watch: Callable[[str], None], locks: Sequence[int]
    ) -> None:
        """Run a command to its end; if the run's folder is moved away meanwhile, that is the error."""
        work.folder.require_in_place()
        try:
            run_logged(command, log, watch, locks)
        except (AlmaError, OSError):
            work.folder.require_in_place()
            raise

    def is_trained(self, folder: RunFolder, model: ModelId) -> bool:
        """Tell whether a model is trained to its end; see `loop.Backend`."""
        last = folder.checkpoint(model)
        return (
            stage_checkpoints.is_whole(last)
            and stage_checkpoints.read_progress(last).has_reached(*self._limits(WHOLE))
            and stage_checkpoints.is_whole(self.commands.predicting(model))
        )

    def has_weights(self, folder: RunFolder, model: ModelId) -> bool:
        """Tell whether a model's last checkpoint is there, undamaged; see `loop.Backend`."""
        with contextlib.suppress(AlmaError):
            return self.is_trained(folder, model)
        return False

    def test(self, work: StageWork) -> Mapping[str, Any]:
        """Test what predicts after the stage; see `loop.Backend`.

        ``after_growth`` in the result has the figures on ``valid`` of a model that grew, before it was trained.
        """
        plan = work.plan
        results: dict[str, Any] = {}
        for training in plan.trainings:
            if training.growth is not None:
                results |= self._test_grown(work, training)
        if plan.combine != "single":
            self._join(work)
        for split in TEST_SPLITS:
            results[split] = self._evaluate(work, self.commands.test(plan, split), split, self._log(plan, split))
        if self.commands.matrix:
            results["matrix"] = self._test_matrix(work)
        facts = [self.describe(self.folder.checkpoint(model)) for model in plan.predictors]
        return {
            "num_params": sum(fact.num_params for fact in facts),
            "num_experts": max(fact.num_experts for fact in facts),
            "num_members": sum(fact.num_members for fact in facts),
            "test_flops_per_token": sum(fact.test_flops_per_token for fact in facts),
            **results,
        }

    def _test_matrix(self, work: StageWork) -> dict[str, list[float]]:
        """Return the losses on the held-out slice and on a training slice of each mega-batch, in bits per token."""
        losses = [
            self._evaluate(work, self.commands.test(work.plan, split), split, self._log(work.plan, "matrix"))["loss"]
            for split in self.commands.matrix_splits()
        ]
        return {"held_out": losses[: self.commands.matrix], "training": losses[self.commands.matrix :]}

    def keep_only(self, folder: RunFolder, stage: int, needed: Sequence[ModelId]) -> None:
        """Remove checkpoints that neither a later stage nor the report needs; see `loop.Backend`."""
        models = [model for index in range(stage + 1) for model in folder.members(index)]
        for model in models:
            if model in needed:
                self._strip(model)
        for model in models:  # only now, when what stays is sure to be on the disk
            if model not in needed:
                stage_checkpoints.remove_all(self.commands.branch_folder(model))
                stage_checkpoints.remove_all(folder.model_folder(model))
        for index in range(stage + 1):
            here = folder.stage_folder(index)
            (here / GROWN_FILE).unlink(missing_ok=True)
            if index < stage:
                # Its members may be gone, and a later stage has one of its own.
                (here / ENSEMBLE_FILE).unlink(missing_ok=True)

    def _test_grown(self, work: StageWork, training: Training) -> dict[str, dict[str, dict[str, float]]]:
        """Return the figures right after growth, measured once: a stage that runs again may have lost what grew.

        Where other weights are tested at an arrival than those that grow, the figures of these before growth too.
        """
        path = self.folder.stage_folder(work.plan.stage.index) / GROWTH_RECORD
        with contextlib.suppress(AlmaError, FileNotFoundError):
            found = as_record(read_json_object(path, ""), TextGrowth, path, "")
            before = None if found.before is None else to_builtins(found.before)
            return _growth_figures(to_builtins(found.valid), before)
        self._grow(work, training, [work.lock])
        figures, plan = {}, work.plan
        for name, when, command in (
            ("valid", "after", self.commands.test_grown(training)),
            ("before", "before", self.commands.test_ungrown(training)),
        ):
            if command is not None:
                log = self._log(plan, f"valid-{when}-growth")
                figures[name] = self._evaluate(work, command, f"valid right {when} growth", log)
        write_json_atomically(path, figures)
        return _growth_figures(figures["valid"], figures.get("before"))

    def _join(self, work: StageWork) -> None:
        """Make the ensemble's checkpoint, which has its members' checksums: they must have their final form before."""
        plan = work.plan
        if not self.commands.keep_checkpoints:
            for model in plan.predictors:
                self._strip(model)
        self._launch(work, self.commands.join(plan), self._log(plan, "ensemble"), _ignore, [work.lock])

    def _strip(self, model: ModelId) -> None:
        """Reduce what is kept of a trained model to its weights, and to what a later stage carries on."""
        if not self.commands.anytime.carry_optimizer:
            stage_checkpoints.drop_optimizer_state(self.folder.checkpoint(model))
        stage_checkpoints.keep_only_last(self.folder.model_folder(model), [self.commands.predicting(model).name])
        if self.commands.anytime.best_checkpoint:
            stage_checkpoints.drop_optimizer_state(self.commands.predicting(model))
        if self.commands.anytime.copies_branch:
            stage_checkpoints.drop_optimizer_state(self.commands.branch(model))
            stage_checkpoints.keep_only_last(self.commands.branch_folder(model))

    def _require_end(
        self, folder: Path, log: Path, limits: tuple[Optional[int], Optional[int]]
    ) -> stage_checkpoints.Progress:
        """Return how far a training got; raise AlmaError unless that is its end."""
        if not stage_checkpoints.is_whole(folder / LAST_CHECKPOINT):
            raise AlmaError(f"{log}: fairseq-train ended without a checkpoint; read the log")
        after = stage_checkpoints.read_progress(folder / LAST_CHECKPOINT)
        if not after.has_reached(*limits):
            raise AlmaError(
                f"{log}: fairseq-train ended after {after.num_updates} updates and {after.num_epochs} epochs, before "
                "--max-update or --max-epoch; read the log"
            )
        self._synchronise(folder)
        return after

    def _evaluate(self, work: StageWork, command: Command, what: str, log: Path) -> dict[str, float]:
        """Return loss (bits per token, 4 decimals as fairseq prints them) and perplexity."""
        work.display.say(work.plan, f"testing on {what}")
        results = []

        def watch(line: str) -> None:
            if match := _EVAL_RESULT.search(line):
                results.append(float(match[1]))

        self._launch(work, command, log, watch, [work.lock])
        if len(results) != 1:
            raise AlmaError(f"{log}: fairseq-eval-lm printed {len(results)} results, one is needed; read the log")
        # From 2 ** 1024 on, the perplexity of a loss that is a number is none; fairseq prints it as inf.
        if not math.isfinite(results[0]) or results[0] >= sys.float_info.max_exp:
            raise AlmaError(
                f"{log}: the loss on {what} is {results[0]}, so the training diverged; start a new --run with a lower "
                "--lr, more --warmup-updates or --clip-norm"
            )
        return {"loss": results[0], "ppl": round(2 ** results[0], 4)}

    def _training(self, plan: StagePlan, training: Training, part: str, done: stage_checkpoints.Progress) -> Command:
        """Return the command that trains a model; its curves resume from the updates that are done."""
        command, live = self.commands.train(plan, training, part), self.commands.live
        if part == BRANCH:
            return command
        live.rewind(self.folder, training.model, done.num_updates and done.first_update + done.num_updates)
        identity = live.wandb_identity(self.folder, training.model)
        return replace(command, environment={**command.environment, **identity})

    def _limits(self, part: str) -> tuple[Optional[int], Optional[int]]:
        """Return how many updates and epochs end a part of a training, counted from its own beginning."""
        return self.commands.num_updates(part), self.commands.options.max_epoch

    def _log(self, plan: StagePlan, name: str) -> Path:
        return self.folder.stage_folder(plan.stage.index) / f"{name}.log"


def _own_tokens(parts: Sequence[stage_checkpoints.Progress]) -> list[int]:
    """Return the tokens that a training took: those of its last part, which counts the first too, and of a branch."""
    return [parts[-1].train_tokens, *(part.train_tokens for part in parts[1:-1])]


def _growth_figures(
    after: dict[str, float], before: Optional[dict[str, float]]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return what stage.json says of growth."""
    shown = {"after_growth": {"valid": after}}
    return shown if before is None else {"before_growth": {"valid": before}, **shown}


def _ignore(line: str) -> None:
    """Take no notice of a line in a log."""
