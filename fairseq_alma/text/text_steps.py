"""Steps of a stage of ``alma-stream`` on text: growth, training, averaging, ensembles and tests.

The steps run fairseq or alma commands and read checkpoints in children of the helper process, so that ``alma-stream``
does not import torch.
"""

import contextlib
import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping, Optional, Sequence

from msgspec import to_builtins

from fairseq_alma.checkpoints import LAST_CHECKPOINT
from fairseq_alma.checkpoints.model_options import WEIGHTS_FLAG
from fairseq_alma.data.stream import split_name
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import as_record, once_per_file, read_json_object, synchronise, write_json_atomically
from fairseq_alma.learners.learner import ModelId, StagePlan, Training
from fairseq_alma.runs.curves import CURVE_OPTIONS, TENSORBOARD, WANDB, wandb_environment
from fairseq_alma.runs.loop import StageWork, Step
from fairseq_alma.runs.run_folder import (
    BEST_FILE,
    BRANCH,
    PREDICTIONS_FILE,
    STAGE_RECORD,
    TRAIN_LOG,
    BeforeRecord,
    predicting_checkpoint,
)
from fairseq_alma.runs.study import SAVE_EVERY_UPDATES, seconds_of
from fairseq_alma.terminal import print_line
from fairseq_alma.text import stage_checkpoints
from fairseq_alma.text.helper import Command, call
from fairseq_alma.text.stage_checkpoints import ModelFacts, Progress
from fairseq_alma.text.train_options import WEIGHT_DECAY, first_decay, replace_option, tokens_per_update
from fairseq_alma.training import features

if TYPE_CHECKING:
    from fairseq_alma.text.text_job import TextJob

NEVER = 1_000_000_000
NUM_LOG_LINES = 100
MAX_LOG_INTERVAL = 25
TEST_SPLITS = ("valid", "test")
COMPLETE, UP_TO_BRANCH = "complete", "up to branch"
# File with the results of tests before training, kept because alma-stream may remove the tested weights.
BEFORE_RECORD = "before.json"
read_progress: Callable[[Path], Progress] = once_per_file(
    partial(call, "fairseq_alma.text.stage_checkpoints:read_progress")
)
describe_checkpoint: Callable[[Path], ModelFacts] = once_per_file(
    partial(call, "fairseq_alma.text.stage_checkpoints:describe_checkpoint")
)


@dataclass(frozen=True)
class TextStep(Step):
    """Base class of the steps of a stage on text, with methods that run fairseq-eval-lm."""

    job: "TextJob"
    plan: StagePlan

    @property
    def here(self) -> Path:  # the folder of the stage
        return self.job.folder.stage_folder(self.plan.stage.index)

    @property
    def predictor(self) -> Path:  # the checkpoint to test after the stage
        return self.job.predictors(self.job.folder, self.plan)[0]

    def evaluation(self, path: Path, *splits: str) -> Command:
        """Return the fairseq-eval-lm command that tests a checkpoint on the given splits."""
        groups = [*self.job.engine, ("--path", str(path), "--gen-subset", ",".join(splits)), ("--log-format", "simple")]
        return Command("fairseq-eval-lm", (*groups, *self.job.options.for_evaluation()))

    def test(
        self, work: StageWork, path: Path, splits: Sequence[str], name: str, given: Sequence[Any] = ()
    ) -> dict[str, dict[str, Any]]:
        """Test a checkpoint on the given splits, and write the log file ``name``.log.

        Returns:
            Metrics of each split: loss (bits per token), perplexity, and bits per byte if the number of bytes is known.

        Raises:
            AlmaError: the command fails, or a loss is not finite or is 1024 bits or more.
        """
        more = f" and {len(splits) - 2} more splits" if len(splits) > 2 else ""
        work.display.show_activity(work.plan, f"testing on {', '.join(splits[:2])}{more}")
        log, stream, found = self.here / f"{name}.log", self.job.stream, {}
        assert stream is not None
        losses = self.evaluation(path, *splits).run(log, work.locks, given=given)
        for split in splits:
            loss = losses[split]
            # The perplexity overflows at a loss of 1024 bits.
            if not math.isfinite(loss) or loss >= sys.float_info.max_exp:
                (norm,) = self.job.last("--clip-norm") or ("0",)
                clip = "a lower --clip-norm" if float(norm) > 0 else "--clip-norm 1"
                raise AlmaError(
                    f"{log}: the loss on {split} is {loss} (training diverged); begin a new folder with a lower --lr, "
                    f"more --warmup-updates, or {clip}"
                )
            per_byte = stream.split(split).bits_per_byte(loss)
            figures = {} if per_byte is None else {"bits_per_byte": round(per_byte, 5)}
            found[split] = {"loss": round(loss, 4), "ppl": round(2**loss, 4), **figures}
        return found


@dataclass(frozen=True)
class TrainingStep(TextStep):
    """Base class of the steps that create one model: `Grow`, `Train` and `Average`."""

    training: Training

    @property
    def trains(self) -> tuple[ModelId, ...]:
        return (self.training.model,)

    def require_start(self) -> None:
        """Raise AlmaError if the checkpoint to start from does not exist."""
        start = self.training.start
        if start is not None and not (path := self.job.starting_checkpoint(start)).is_file():
            raise AlmaError(
                f"{path}: no such file, but stage {self.training.model.stage} starts from this checkpoint; remove "
                f"{self.job.folder.stage_folder(start.stage) / STAGE_RECORD} and run --stage {start.stage} again"
            )


@dataclass(frozen=True)
class Grow(TrainingStep):
    """Growth step: add experts, layers or both to the checkpoint that a training run starts from."""

    def is_done(self, model: Optional[ModelId] = None) -> bool:
        return self.job.grown(self.training.model).is_file() or Train(self.job, self.plan, self.training).is_done()

    def commands(self) -> Sequence[Command]:
        job, start, growth = self.job, self.training.start, self.training.growth
        assert start is not None and growth is not None, self.training
        sizes = ("--method", growth.method, "--experts", str(growth.num_new)) if growth.num_new else ()
        layers = ("--layers", str(growth.layers)) if growth.layers is not None else ()
        is_halved = growth.method == "split" and growth.num_new and not (growth.is_first and growth.num_new > 1)
        selects = growth.num_new > 0 and growth.method != "scratch" and not growth.is_first
        measures = selects and growth.select != "random"
        shared = [words for words in job.options.for_evaluation() if words[0] in ("--cpu", "--batch-size")]
        groups: list[tuple[str, ...]] = [
            ("--path", str(job.starting_checkpoint(start)), "--out", str(job.grown(self.training.model))),
            (*sizes, *layers, "--seed", str(growth.seed)),
            ("--optimizer", "share" if is_halved else "copy") if job.carries_optimizer else (),
            ("--select", growth.select) if selects else (),
            *([("--stream", str(job.request.stream)), *shared] if measures else []),
            ("--noise", repr(growth.noise)) if growth.noise else (),
        ]
        return [Command("alma-grow", tuple(groups))]

    def run(self, work: StageWork) -> Mapping[str, Any]:
        if not self.is_done():
            self.require_start()
            work.display.show_activity(work.plan, "growing", self.training)
            self.commands()[0].run(self.here / "grow.log", work.locks)
        return {}


@dataclass(frozen=True)
class Train(TrainingStep):
    """Training step: train one model with fairseq-train.

    Attributes:
        part: ``COMPLETE``: all updates; ``UP_TO_BRANCH``: the updates before the branch; ``BRANCH``: the
            updates of the branch, a copy of the model that is trained with a decaying learning rate.
    """

    part: str = COMPLETE

    @property
    def folder(self) -> Path:
        """Return the folder in which fairseq-train saves the checkpoints of this step."""
        own = self.job.folder.model_folder(self.training.model)
        return own / BRANCH if self.part == BRANCH else own

    @property
    def limits(self) -> tuple[Optional[int], Optional[int]]:
        """Return (maximum number of updates, maximum number of epochs) of this step; None: no limit."""
        return self.job.num_updates(self.training, self.part), self.job.options.max_epoch

    def is_done(self, model: Optional[ModelId] = None) -> bool:
        """Return whether training has reached a limit and, if ``job.keeps_best``, the best checkpoint is complete.

        Raises:
            AlmaError: the last checkpoint is damaged.
        """
        needed = [self.folder / LAST_CHECKPOINT, *([self.folder / BEST_FILE] if self.job.keeps_best else [])]
        if not all(map(stage_checkpoints.is_complete, needed)):
            return False
        done = read_progress(needed[0])
        return not self._is_outdated(done) and done.has_reached(*self.limits)

    def commands(self) -> Sequence[Command]:
        """Return one fairseq-train command, which also resumes an interrupted training run."""
        job, training, request, stage = self.job, self.training, self.job.request, self.plan.stage
        wait = request.iid or (request.first_wait if stage.index == 0 else None) or request.wait
        seconds, max_epoch = seconds_of(request.save_every), job.options.max_epoch
        lines = (job.stage_updates(training.model.stage) or NEVER) // NUM_LOG_LINES
        groups: list[tuple[str, ...]] = [
            *job.engine,
            ("--megabatch", str(stage.arrivals[-1]), "--wait", str(wait), *(["--replay"] if request.replay else [])),
            ("--seed", str(training.seed), "--save-dir", str(self.folder)),
            ("--distributed-world-size", str(request.num_procs)) if request.num_procs > 1 else (),
            self._start_options(),
            () if request.features_from is None else ("--features-from", str(Path(request.features_from).resolve())),
            *job.features.words(job.part(training, self.part)),
            # fairseq saves every --save-interval epochs, but only the last epoch needs to be saved.
            ("--no-epoch-checkpoints", "--save-interval", str(max_epoch or NEVER)),
            ("--save-interval-updates", str(request.save_every or SAVE_EVERY_UPDATES))
            if seconds is None
            else ("--save-interval-minutes", f"{seconds / 60:g}"),
            () if request.keep_checkpoints else ("--keep-interval-updates", "1"),
            ("--log-format", "json", "--log-interval", str(min(MAX_LOG_INTERVAL, max(1, lines)))),
            () if request.validate or job.keeps_best else ("--disable-validation",),
            *self._given_options(),
        ]
        environment = wandb_environment(job.folder, training.model) if job.last(WANDB) else {}
        return [Command("fairseq-train", tuple(groups), environment, request.num_procs)]

    def _start_options(self) -> tuple[str, ...]:
        job, start, initial = self.job, self.training.start, self.job.request.finetune_from_model
        if self.part == BRANCH:
            last = job.folder.checkpoint(self.training.model)
            return ("--continue-once", str(last), "--continue-as", features.BRANCH)
        if start is None:
            return () if initial is None else (WEIGHTS_FLAG, str(initial))
        path = str(job.grown(self.training.model) if self.training.growth else job.starting_checkpoint(start))
        carried = ("--continue-once", path, "--continue-as", features.STAGE)
        return carried if job.carries_optimizer else (WEIGHTS_FLAG, path)

    def _given_options(self) -> list[tuple[str, ...]]:
        """Return the options after ``--``, adapted to the length, model size and log folders of this training run."""
        job, training = self.job, self.training
        options, num_updates = job.options.options, self.limits[0]
        if num_updates is not None and (job.carries_optimizer or self.part != COMPLETE or job.lengths is not None):
            end = job.first_update(training, self.part) + num_updates
            options = replace_option(options, "--max-update", str(end))
        if "--total-num-update" in job.recipe.chosen:
            options = replace_option(options, "--total-num-update", str(job.stage_updates(training.model.stage)))
        is_new = training.start is None and job.request.finetune_from_model is None
        if is_new and job.recipe.chosen.get("--weight-decay") == str(WEIGHT_DECAY):
            rate, updates = " ".join(job.last("--lr") or ()), job.stage_updates(training.model.stage)
            options = replace_option(options, "--weight-decay", f"{first_decay(rate, updates):.3g}")
        if self.part == BRANCH:  # the curves of the branch would overlap the curves of the main training
            options = [option for option in options if option[0] not in CURVE_OPTIONS]
        if logdir := job.last(TENSORBOARD):
            member = job.folder.model_folder(training.model).relative_to(job.folder.root)
            folder = Path(logdir[0]) / job.folder.name / member
            options = replace_option(options, TENSORBOARD, str(folder))
        return [*((name, *values) for name, values in options), *training.sizes]

    def run(self, work: StageWork) -> Mapping[str, Any]:
        self._reset()
        last = stage_checkpoints.repair_last(self.folder)
        done = read_progress(last) if last else Progress(0, 0, 0)
        if self._is_outdated(done) or not (done.has_optimizer or done.has_reached(*self.limits)):
            reason = "older than a mega-batch of its stage, or without the optimizer state for more --passes"
            print_line(f"note: {last}: {reason}; training again", sys.stderr)
            stage_checkpoints.remove(self.folder)
            done = Progress(0, 0, 0)
        self._refuse_other_updates(done)
        if not done.has_reached(*self.limits):
            done = self._train(work, done.num_updates)
        # Fsync the final checkpoints before writing stage.json.
        synchronise(*filter(Path.is_file, (self.folder / LAST_CHECKPOINT, self.folder / BEST_FILE)), self.folder)
        if self.part == UP_TO_BRANCH:  # the costs of the complete training include these updates
            return {}
        # A backward pass has twice the FLOPs of a forward pass; recomputed activations do not count.
        flops = 3 * describe_checkpoint(self.folder / LAST_CHECKPOINT).test_flops_per_token
        costs = {"train_tokens": done.train_tokens, "train_flops": done.train_tokens * flops}
        if self.part == BRANCH:
            return costs
        described = self.job.features.describe(self.job.part(self.training, self.part))
        return {
            "num_updates": done.num_updates,
            **costs,
            **({"anytime": {"first_update": done.first_update, **described}} if described else {}),
            **({"batches": [*done.batches]} if len(done.batches) > 1 else {}),
        }

    def _refuse_other_updates(self, done: Progress) -> None:
        """Raise AlmaError if another number of tokens per update would change the passes of an interrupted stage."""
        if self.job.lengths is None or not done.batches:
            return
        now, before = self.job.recipe.per_update, done.batches[-1]
        steps = before["update_freq"][0] * before["num_procs"]
        limits = {"--batch-size": before["batch_size"], "--max-tokens": before["max_tokens"], "--update-freq": steps}
        same = {"--tokens-per-sample": " ".join(self.job.last("--tokens-per-sample") or ())}
        begun = tokens_per_update(same | {name: str(each) for name, each in limits.items() if each is not None})
        if begun != now:
            raise AlmaError(
                f"{self.folder / LAST_CHECKPOINT}: the stage began with {begun:,} tokens per update, found {now:,}; "
                f"give --batch-size and --update-freq for {begun:,} tokens, for example half of the first and twice "
                "the second"
            )

    def _train(self, work: StageWork, num_updates: int) -> Progress:
        """Run fairseq-train from update ``num_updates`` of this step; return the progress of the last checkpoint."""
        self.require_start()
        # An average of fewer updates would count as complete.
        predicting_checkpoint(self.job.folder, self.training.model, "average").unlink(missing_ok=True)
        member = self.training.model.member
        log = self.here / TRAIN_LOG.format(f"{member}-branch" if self.part == BRANCH else member)
        (command,) = self.commands()
        max_update, max_epoch = self.limits
        first_update = self.job.first_update(self.training, self.part)
        with work.display.training(self.plan, self.training, max_update, num_updates) as progress:

            def watch(figures: Mapping[str, Any]) -> None:
                updates, epochs = int(figures["num_updates"]) - first_update, float(figures.get("update") or 0)
                if max_epoch is not None and epochs > 0:  # fairseq's "update" is the fractional number of epochs
                    by_epochs = max(updates, round(updates * max_epoch / epochs))
                    progress.max_update = by_epochs if max_update is None else min(max_update, by_epochs)
                loss = float(figures.get("nll_loss", figures.get("loss")))
                progress.update(updates, loss, float(figures["wps"]) if "wps" in figures else None)

            command.run(log, work.locks, watch=watch)
        last = self.folder / LAST_CHECKPOINT
        if not stage_checkpoints.is_complete(last):
            raise AlmaError(f"{log}: fairseq-train ended without writing {last}; read the log")
        after = read_progress(last)
        if not after.has_reached(max_update, max_epoch):
            raise AlmaError(
                f"{log}: fairseq-train ended after {after.num_updates} updates and {after.num_epochs} epochs, before "
                "reaching --max-update or --max-epoch; read the log"
            )
        return after

    def _is_outdated(self, progress: Progress) -> bool:
        """Return whether a checkpoint was trained before mega-batches were appended to its stage."""
        return progress.megabatch not in (None, self.plan.stage.arrivals[-1])

    def _reset(self) -> None:
        """Remove the checkpoints of the training run if they cannot be used.

        This is the case if another number of passes moved the start of the branch, or if a crash damaged a checkpoint
        that cannot be written again: the best checkpoint, or the branch once the main training has continued past the
        start of the branch.
        """
        best = self.folder / BEST_FILE
        if self.job.keeps_best and best.is_file() and not stage_checkpoints.is_sound(best):
            stage_checkpoints.remove(self.folder)
        if self.part != UP_TO_BRANCH or (last := stage_checkpoints.repair_last(self.folder)) is None:
            return
        branch = replace(self, part=BRANCH)
        begun = stage_checkpoints.repair_last(branch.folder)
        if begun and read_progress(begun).first_update != self.job.first_update(self.training, BRANCH):
            stage_checkpoints.remove(branch.folder)
        split, _ = self.limits
        if not branch.is_done() and split is not None and read_progress(last).num_updates > split:
            stage_checkpoints.remove(branch.folder)
            stage_checkpoints.remove(self.folder)


@dataclass(frozen=True)
class Average(TrainingStep):
    """Averaging step: write a checkpoint with the averaged weights of a trained model."""

    def is_done(self, model: Optional[ModelId] = None) -> bool:
        return stage_checkpoints.is_sound(self.job.predicting(self.training.model))

    def commands(self) -> Sequence[Command]:
        last, average = self.job.folder.checkpoint(self.training.model), self.job.predicting(self.training.model)
        return [Command("alma-ensemble", ((str(last), "--average", "--out", str(average), "--force"),))]

    def run(self, work: StageWork) -> Mapping[str, Any]:
        if not self.is_done():
            call("fairseq_alma.cli.ensemble:main", self.commands()[0].arguments, files=work.locks)
        return {}


class Before(TextStep):
    """Test step before training.

    Test the grown model on ``valid``, and the model of the previous stage on the held-out splits of new mega-batches.
    If the previous stage tested other weights than those of the checkpoint to grow (averaged weights, for example),
    also test the checkpoint to grow on ``valid``.
    """

    @property
    def tests(self) -> list[tuple[str, Path, list[str]]]:
        """Return (name, checkpoint, splits) of each test."""
        found = []
        for training in self.plan.trainings:
            if training.growth is not None and training.start is not None:
                found.append(("after_growth", self.job.grown(training.model), ["valid"]))
                if (path := self.job.starting_checkpoint(training.start)) != self.job.predicting(training.start):
                    found.append(("before_growth", path, ["valid"]))
        index, splits = self.plan.stage.index, self.job.holdouts(self.plan.stage.arrivals)
        if index > 0 and splits:
            previous = self.job.learner.plan(self.job.stages(index)[index - 1])
            found.append(("holdouts", *self.job.predictors(self.job.folder, previous), splits))
        return found

    def commands(self) -> Sequence[Command]:
        return [self.evaluation(path, *splits) for _, path, splits in self.tests]

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Return the results in `BEFORE_RECORD`; if this file is missing or damaged, run all tests first."""
        found = self.read()
        known = set((found or {}).get("holdouts") or ())
        has_more = bool(known) and not known.issuperset(self.job.holdouts(self.plan.stage.arrivals))  # appended since
        if found is None or has_more:
            found = {
                name: self.test(work, path, splits, name)
                for name, path, splits in self.tests
                if name != "holdouts" or path.is_file()  # the run may not keep the weights of the previous stage
            }
            write_json_atomically(self.here / BEFORE_RECORD, found)
        return {name: found[name] for name in ("before_growth", "after_growth") if found.get(name)}

    def read(self) -> Optional[dict[str, Any]]:
        """Return the results in `BEFORE_RECORD`; None if the file is missing or damaged."""
        path = self.here / BEFORE_RECORD
        with contextlib.suppress(AlmaError, FileNotFoundError):
            return to_builtins(as_record(read_json_object(path, ""), BeforeRecord, path, ""))
        return None


class Join(TextStep):
    """Ensemble step: write the ensemble checkpoint of the stage."""

    def commands(self) -> Sequence[Command]:
        members = tuple(str(self.job.predicting(model)) for model in self.plan.predictors)
        return [Command("alma-ensemble", (members, ("--out", str(self.predictor), "--force")))]

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Remove unneeded optimizer states from the members, then write the ensemble, which stores their checksums."""
        if not self.job.request.keep_checkpoints:
            for model in self.plan.predictors:
                self.job.strip(model)
        call("fairseq_alma.cli.ensemble:main", self.commands()[0].arguments, files=work.locks)
        return {}


class Test(TextStep):
    """Test step after training: test on ``valid``, ``test``, and the held-out split of each mega-batch so far.

    The step also counts parameters, experts, members and FLOPs of the tested model or ensemble.
    """

    @property
    def splits(self) -> list[str]:
        return [*TEST_SPLITS, *self.job.holdouts(range(self.plan.stage.arrivals[-1] + 1))]

    def commands(self) -> Sequence[Command]:
        return [self.evaluation(self.predictor, split) for split in self.splits]

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Return counts and test metrics. For an ensemble, compute only predictions that no file stores yet."""
        facts = [describe_checkpoint(self.job.folder.checkpoint(model)) for model in self.plan.predictors]
        kept: tuple[Optional[Path], ...] = ()
        if len(self.plan.predictors) > 1:
            before = self.job.folder.stage_folder(self.plan.stage.index - 1) / PREDICTIONS_FILE
            kept = (before if self.plan.stage.index else None, self.here / PREDICTIONS_FILE)
        found = self.test(work, self.predictor, self.splits, "test", kept)
        earlier = (Before(self.job, self.plan).read() or {}).get("holdouts") or {}
        names = {t: split_name(t, "holdout") for t in range(self.plan.stage.arrivals[-1] + 1)}
        holdouts = [
            {"megabatch": t, **found[name], "before": earlier.get(name)} for t, name in names.items() if name in found
        ]
        return {
            "num_params": sum(fact.num_params for fact in facts),
            "num_experts": max(fact.num_experts for fact in facts),
            "num_members": len(facts),
            "test_flops_per_token": sum(fact.test_flops_per_token for fact in facts),
            **{split: found[split] for split in TEST_SPLITS},
            **({"holdouts": holdouts} if holdouts else {}),
        }
