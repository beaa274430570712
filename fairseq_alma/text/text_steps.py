"""A stage of ``alma-stream`` on text as a list of steps; what trains, grows and tests are stock commands.

What ``--dry-run`` prints, what runs, and whether a model is there: all of it is asked of the same steps. What reads a
checkpoint runs in a child of the helper process too: this one never imports torch.
"""

import contextlib
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping, Optional, Sequence

from msgspec import to_builtins

import fairseq_alma
from fairseq_alma.checkpoints import LAST_CHECKPOINT
from fairseq_alma.checkpoints.model_options import from_weights
from fairseq_alma.data.stream import Stream, holdout_name
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import as_record, once_per_file, read_json_object, write_json_atomically
from fairseq_alma.learners.learner import ModelId, StagePlan, Training
from fairseq_alma.metrics import bits_per_byte
from fairseq_alma.options import GivenOption
from fairseq_alma.runs.loop import StageWork, Step
from fairseq_alma.runs.records import BeforeRecord
from fairseq_alma.runs.run_folder import BEST, BRANCH, PREDICTIONS_FILE, stage_predictor
from fairseq_alma.runs.study import SAVE_EVERY_UPDATES, seconds_of
from fairseq_alma.text import stage_checkpoints
from fairseq_alma.text.command import Command
from fairseq_alma.text.helper import call
from fairseq_alma.text.stage_checkpoints import Progress
from fairseq_alma.text.train_options import replace_option
from fairseq_alma.watch.arrivals import CURVE_OPTIONS, TENSORBOARD, WANDB, curves_folder, wandb_environment
from fairseq_alma.watch.run_display import TrainingProgress

if TYPE_CHECKING:
    from fairseq_alma.checkpoints.model_facts import ModelFacts
    from fairseq_alma.text.text_job import TextJob

NEVER = 1_000_000_000
NUM_LOG_LINES = 100
MAX_LOG_INTERVAL = 25
TEST_SPLITS = ("valid", "test")
WHOLE, UP_TO_BRANCH = "whole", "up to branch"
"""Parts of a training; the third is `BRANCH`, which is also the folder of what branches off."""
TOTAL = "--total-num-update"
BEFORE_RECORD = "before.json"
"""What was measured before the training: when the weights of that time are gone, it cannot be measured again."""

Groups = list[tuple[str, ...]]


@dataclass(frozen=True)
class TextStep(Step):
    """A step of a stage; see `loop.Step`.

    Attributes:
        job: of the run: its options, and which file has what.
        plan: of the stage.
    """

    job: "TextJob"
    plan: StagePlan

    @property
    def here(self) -> Path:
        """The stage's folder."""
        return self.job.folder.stage_folder(self.plan.stage.index)

    def log(self, name: str) -> Path:
        """Return the path of a log of the stage."""
        return self.here / f"{name}.log"

    def engine(self) -> Groups:
        """Return the options that any of fairseq's commands begins with."""
        plugin = Path(fairseq_alma.__file__).parent
        return [(str(self.job.request.stream),), ("--user-dir", str(plugin), "--task", "alma_lm")]

    def evaluation(self, path: Path, *splits: str) -> Command:
        """Return the command that tests a checkpoint on some splits."""
        groups = [*self.engine(), ("--path", str(path), "--gen-subset", ",".join(splits)), ("--log-format", "simple")]
        options = self.job.options.for_evaluation()
        return Command("fairseq-eval-lm", (*groups, *((name, *values) for name, values in options)))

    def launch(self, work: StageWork, command: Command, log: Path, **how: Any) -> Any:
        """Run a command, and return its value."""
        return command.run(log, work.locks, **how)

    def test(
        self, work: StageWork, path: Path, splits: Sequence[str], log: Path, further: Sequence[str] = ()
    ) -> dict[str, dict[str, Any]]:
        """Return for each split loss (bits per token), perplexity, and bits per byte where it has a text."""
        work.display.show_activity(work.plan, f"testing on {', '.join(splits[:2])}{', …' if len(splits) > 2 else ''}")
        losses = self.launch(work, self.evaluation(path, *splits), log, further=further)
        return {split: _result(losses[split], self.job.stream, split, log) for split in splits}


def _result(loss: float, stream: Optional[Stream], split: str, log: Path) -> dict[str, Any]:
    # From 2 ** 1024 on, the perplexity of a loss that is a number is none.
    if not math.isfinite(loss) or loss >= sys.float_info.max_exp:
        raise AlmaError(
            f"{log}: the loss on {split} is {loss}, so the training diverged; start a new --run with a lower --lr, "
            "more --warmup-updates or --clip-norm"
        )
    assert stream is not None
    part = stream.split(split)
    per_byte = bits_per_byte(loss, part.num_tokens, part.num_bytes)
    shown = {"loss": round(loss, 4), "ppl": round(2**loss, 4)}
    return shown if per_byte is None else {**shown, "bits_per_byte": round(per_byte, 5)}


@dataclass(frozen=True)
class TrainingStep(TextStep):
    """A part of what makes one model of the stage."""

    training: Training

    @property
    def trains(self) -> tuple[ModelId, ...]:
        """The model."""
        return (self.training.model,)

    def require_start(self) -> None:
        """Raise AlmaError unless the weights that the training starts from are there."""
        start = self.training.start
        if start is not None and not (path := self.job.begins_from(start)).is_file():
            raise AlmaError(
                f"{path}: not there, and stage {self.training.model.stage} starts from it; remove "
                f"{self.job.folder.stage_folder(start.stage)} to train that stage again"
            )


@dataclass(frozen=True)
class Grow(TrainingStep):
    """Adds experts, layers or both to the weights that a training starts from."""

    def is_done(self, model: Optional[ModelId] = None) -> bool:
        """Return whether what grows is there, or not needed any more."""
        is_there = self.job.grown(self.training.model).is_file()
        return is_there or Train(self.job, self.plan, self.training).is_done()

    def commands(self) -> Sequence[Command]:
        """Return the call of alma-grow."""
        start, growth = self.training.start, self.training.growth
        assert start is not None and growth is not None, self.training
        groups: Groups = [
            ("--path", str(self.job.begins_from(start)), "--out", str(self.job.grown(self.training.model))),
            (
                *(("--method", growth.method, "--experts", str(growth.num_new)) if growth.num_new else ()),
                *(("--layers", str(growth.layers)) if growth.layers is not None else ()),
                *("--seed", str(growth.seed)),
            ),
        ]
        if self.job.carries_optimizer:
            groups.append(("--optimizer", "share" if growth.num_new and growth.method == "split" else "copy"))
        if growth.num_new and growth.method != "scratch":
            groups.append(("--select", growth.select, *(self._measuring() if growth.select != "random" else ())))
        if growth.noise:
            groups.append(("--noise", repr(growth.noise)))
        return [Command("alma-grow", tuple(groups))]

    def _measuring(self) -> tuple[str, ...]:
        """Return the options of alma-grow's pass over held-out text."""
        options = self.job.options
        cpu = ("--cpu",) if options.last("--cpu") is not None else ()
        batch = [values for name, values in options.for_evaluation() if name == "--batch-size"]
        return ("--stream", str(self.job.request.stream), *cpu, *(("--batch-size", *batch[0]) if batch else ()))

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Grow, unless that is done. fairseq-train looks at the file again when it resumes."""
        if not self.is_done():
            self.require_start()
            work.display.show_activity(work.plan, "growing", self.training)
            self.launch(work, self.commands()[0], self.log("grow"))
        return {}


@dataclass(frozen=True)
class Train(TrainingStep):
    """Trains one model, or a part of that.

    Attributes:
        part: ``WHOLE``: to its end; ``UP_TO_BRANCH``: to where a copy branches off; ``BRANCH``: that copy.
    """

    part: str = WHOLE

    @property
    def folder(self) -> Path:
        """The save directory."""
        return self.job.save_folder(self.training.model, self.part)

    @property
    def limits(self) -> tuple[Optional[int], Optional[int]]:
        """How many updates and epochs end it, counted from its own beginning."""
        return self.job.num_updates(self.training, self.part), self.job.options.max_epoch

    def is_done(self, model: Optional[ModelId] = None) -> bool:
        """Return whether it is trained to its end. Raises AlmaError if its checkpoint is damaged."""
        last, best = self.folder / LAST_CHECKPOINT, self.folder / BEST
        return (
            stage_checkpoints.is_complete(last)
            and read_progress(last).has_reached(*self.limits)
            and (not self.job.keeps_best or stage_checkpoints.is_complete(best))
        )

    def commands(self) -> Sequence[Command]:
        """Return the call of fairseq-train; given again after a kill, it resumes."""
        request, model = self.job.request, self.training.model
        stage = self.plan.stage
        wait = request.iid or (request.first_wait if stage.index == 0 else None) or request.wait
        data = ("--megabatch", str(stage.last_arrival), "--wait", str(wait))
        groups: Groups = [
            *self.engine(),
            (*data, "--replay") if request.replay else data,
            ("--seed", str(self.training.seed), "--save-dir", str(self.folder)),
        ]
        if request.num_procs > 1:
            groups.append(("--distributed-world-size", str(request.num_procs)))
        groups += [*self._start(), *self._features(), *self._saving(), *self._reporting()]
        groups += [(name, *values) for name, values in self._model()]
        environment = wandb_environment(self.job.folder, model) if self.job.last(WANDB) else {}
        return [Command("fairseq-train", tuple(groups), environment, request.num_procs)]

    def _start(self) -> Groups:
        """Return the options that name what the training begins with."""
        job, training = self.job, self.training
        if self.part == BRANCH:
            path = job.folder.checkpoint(training.model)
            return [("--continue-once", str(path), "--continue-as", "branch")]
        if training.start is None:
            beginning = job.request.finetune_from_model
            return [] if beginning is None else [from_weights(beginning)]
        path = job.grown(training.model) if training.growth else job.begins_from(training.start)
        if job.carries_optimizer:
            return [("--continue-once", str(path), "--continue-as", "stage")]
        return [from_weights(path)]

    def _features(self) -> Groups:
        """Return the options of the training's features."""
        source = self.job.request.features_from
        groups: Groups = [] if source is None else [("--features-from", str(Path(source).resolve()))]
        return groups + self.job.features.words(self.job.part(self.training, self.part))

    def _saving(self) -> Groups:
        # At the end of an epoch fairseq saves every --save-interval epochs: only the last one must be.
        save_every = self.job.request.save_every
        seconds = seconds_of(save_every)
        within = ("updates", save_every or SAVE_EVERY_UPDATES) if seconds is None else ("minutes", f"{seconds / 60:g}")
        every = [
            ("--no-epoch-checkpoints", "--save-interval", str(self.job.options.max_epoch or NEVER)),
            (f"--save-interval-{within[0]}", str(within[1])),
        ]
        return every if self.job.request.keep_checkpoints else [*every, ("--keep-interval-updates", "1")]

    def _reporting(self) -> Groups:
        max_update = self.job.stage_updates(self.training.model.stage)
        every = MAX_LOG_INTERVAL if max_update is None else min(MAX_LOG_INTERVAL, max(1, max_update // NUM_LOG_LINES))
        log: Groups = [("--log-format", "json", "--log-interval", str(every))]
        is_validated = self.job.request.validate or self.job.keeps_best
        return log if is_validated else [*log, ("--disable-validation",)]

    def _model(self) -> list[GivenOption]:
        """Return the user's options, with those of the model as the training wants it."""
        job, training = self.job, self.training
        options, num_updates = job.options.options, self.limits[0]
        if num_updates is not None and (job.carries_optimizer or self.part != WHOLE or job.lengths is not None):
            end = job.first_update(training, self.part) + num_updates
            options = replace_option(options, "--max-update", str(end))
        if job.recipe is not None and TOTAL in job.recipe.chosen:
            options = replace_option(options, TOTAL, str(job.stage_updates(training.model.stage)))
        if self.part == BRANCH:  # it would be drawn over what it branches off from
            options = [option for option in options if option[0] not in CURVE_OPTIONS]
        if logdir := job.last(TENSORBOARD):
            folder = curves_folder(logdir[0], job.folder, training.model)
            options = replace_option(options, TENSORBOARD, str(folder))
        sizes = {"--decoder-layers": training.num_layers, "--num-experts": training.num_experts}
        return [*options, *((name, (str(size),)) for name, size in sizes.items() if size is not None)]

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Train to the end, unless that is done; return what it took."""
        done = self._train(work)
        if self.part == UP_TO_BRANCH:  # the whole counts it too
            return {}
        flops = _facts(self.folder / LAST_CHECKPOINT).train_flops_per_token
        share = {"train_tokens": done.train_tokens, "train_flops": done.train_tokens * flops}
        if self.part == BRANCH:
            return share
        described = self.job.features.describe(self.job.part(self.training, self.part))
        anytime = {"anytime": {"first_update": done.first_update, **described}} if described else {}
        batches = getattr(done, "batches", ())
        changed = {"batches": list(batches)} if len(batches) > 1 else {}
        return {"num_updates": done.num_updates, **share, **anytime, **changed}

    def _train(self, work: StageWork) -> Progress:
        """Train, unless that is done; return how far it is."""
        self._reset_after_crash()
        last = stage_checkpoints.repair_last(self.folder)
        before = read_progress(last) if last else Progress(0, 0, 0)
        if last and before.has_reached(*self.limits):
            self._synchronise()
            return before
        self.require_start()
        branch = "-branch" if self.part == BRANCH else ""
        log = self.log(f"train-member-{self.training.model.member}{branch}")
        (command,) = self.commands()
        with work.display.training(self.plan, self.training, self.limits[0], before.num_updates) as progress:
            first_update = self.job.first_update(self.training, self.part)
            self.launch(work, command, log, watch=_watch(progress, self.limits[1], first_update))
        return self._require_end(log)

    def _reset_after_crash(self) -> None:
        """Begin anew where a power failure has cut off what the last checkpoint does not have.

        That is the best checkpoint; or a copy, once the training is past the place where it had branched off.
        """
        best = self.folder / BEST
        if self.job.keeps_best and best.is_file() and not stage_checkpoints.is_sound(best):
            stage_checkpoints.remove_all(self.folder)
        if self.part != UP_TO_BRANCH or (last := stage_checkpoints.repair_last(self.folder)) is None:
            return
        branch = replace(self, part=BRANCH)
        stage_checkpoints.repair_last(branch.folder)
        split, _ = self.limits
        if not branch.is_done() and split is not None and read_progress(last).num_updates > split:
            stage_checkpoints.remove_all(branch.folder)
            stage_checkpoints.remove_all(self.folder)

    def _require_end(self, log: Path) -> Progress:
        """Return how far the training got; raise AlmaError unless that is its end."""
        last = self.folder / LAST_CHECKPOINT
        if not stage_checkpoints.is_complete(last):
            raise AlmaError(f"{log}: fairseq-train ended without a checkpoint; read the log")
        after = read_progress(last)
        if not after.has_reached(*self.limits):
            raise AlmaError(
                f"{log}: fairseq-train ended after {after.num_updates} updates and {after.num_epochs} epochs, before "
                "--max-update or --max-epoch; read the log"
            )
        self._synchronise()
        return after

    def _synchronise(self) -> None:
        """Write the final checkpoints through to the disk, before any stage.json says that they are there."""
        stage_checkpoints.synchronise(self.folder / LAST_CHECKPOINT, self.folder)
        if self.job.keeps_best and (self.folder / BEST).is_file():
            stage_checkpoints.synchronise(self.folder / BEST, self.folder)


def _watch(
    progress: TrainingProgress, max_epoch: Optional[int], first_update: int
) -> Callable[[Mapping[str, Any]], None]:
    """Return what shows the figures that fairseq-train logs.

    Args:
        progress: of the training.
        max_epoch: passes over the data after which it ends, if updates do not end it before.
        first_update: updates that the optimizer had made when the stage began; fairseq counts them too.
    """
    limit = progress.max_update

    def watch(figures: Mapping[str, Any]) -> None:
        num_updates, epochs = int(figures["num_updates"]) - first_update, float(figures.get("update") or 0)
        if max_epoch is not None and epochs > 0:  # fairseq's "update" counts passes over the data, with a fraction
            by_epochs = max(num_updates, round(num_updates * max_epoch / epochs))
            progress.max_update = by_epochs if limit is None else min(limit, by_epochs)
        loss = figures["nll_loss"] if "nll_loss" in figures else figures["loss"]
        progress.update(num_updates, float(loss), float(figures["wps"]) if "wps" in figures else None)

    return watch


@dataclass(frozen=True)
class Average(TrainingStep):
    """Makes a checkpoint of the averaged weights of a trained model."""

    def is_done(self, model: Optional[ModelId] = None) -> bool:
        """Return whether it is there, undamaged."""
        return stage_checkpoints.is_sound(self.job.predicting(self.training.model))

    def commands(self) -> Sequence[Command]:
        """Return the command that does what `run` does."""
        last, average = self.job.folder.checkpoint(self.training.model), self.job.predicting(self.training.model)
        return [Command("alma-ensemble", ((str(last), "--average", "--out", str(average), "--force"),))]

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Make it, unless it is there."""
        if not self.is_done():
            model = self.training.model
            paths = (self.job.folder.checkpoint(model), self.job.predicting(model))
            call("fairseq_alma.training.average:write_average", *paths, files=work.locks)
        return {}


class Count(TextStep):
    """Counts what predicts after the stage: parameters, experts, members, operations."""

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Look into its checkpoints."""
        facts = [_facts(self.job.folder.checkpoint(model)) for model in self.plan.predictors]
        return {
            "num_params": sum(fact.num_params for fact in facts),
            "num_experts": max(fact.num_experts for fact in facts),
            "num_members": sum(fact.num_members for fact in facts),
            "test_flops_per_token": sum(fact.test_flops_per_token for fact in facts),
        }


class Before(TextStep):
    """Tests before the training: a model right after growth on ``valid``, and on new held-out parts the one before.

    Where other weights are tested at an arrival than those that grow, these too, as they were before growth.
    """

    @property
    def tests(self) -> list[tuple[str, Path, list[str]]]:
        """What is tested: a name, the checkpoint, the splits."""
        found = []
        for training in self.plan.trainings:
            if training.growth is not None and training.start is not None:
                found.append(("after_growth", self.job.grown(training.model), ["valid"]))
                if (path := self.job.begins_from(training.start)) != self.job.predicting(training.start):
                    found.append(("before_growth", path, ["valid"]))
        index, splits = self.plan.stage.index, self.job.holdouts(self.plan.stage.arrivals)
        if index > 0 and splits and (record := self.job.folder.read_stage(index - 1)) is not None:
            with contextlib.suppress(AlmaError):  # it is not kept
                found.append(("holdouts", stage_predictor(self.job.folder, record), splits))
        return found

    def commands(self) -> Sequence[Command]:
        """Return the tests."""
        return [self.evaluation(path, *splits) for _, path, splits in self.tests]

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Return the figures, measured once."""
        found = self._read()
        if found is None:
            found = {name: self.test(work, path, splits, self.log(name)) for name, path, splits in self.tests}
            write_json_atomically(self.here / BEFORE_RECORD, found)
        growth = {name: found[name] for name in ("before_growth", "after_growth") if found.get(name)}
        return {**growth, **({"holdouts": found["holdouts"]} if found.get("holdouts") else {})}

    def _read(self) -> Optional[dict[str, Any]]:
        path = self.here / BEFORE_RECORD
        with contextlib.suppress(AlmaError, FileNotFoundError):
            return to_builtins(as_record(read_json_object(path, ""), BeforeRecord, path, ""))
        return None


class Join(TextStep):
    """Makes one checkpoint of all that predicts after the stage."""

    def commands(self) -> Sequence[Command]:
        """Return the command that does what `run` does."""
        (predictor,) = self.job.predictors(self.job.folder, self.plan)
        members = tuple(str(self.job.predicting(model)) for model in self.plan.predictors)
        return [Command("alma-ensemble", (members, ("--out", str(predictor), "--force")))]

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Join the members. The file has their checksums: they must have their final form before."""
        if not self.job.request.keep_checkpoints:
            for model in self.plan.predictors:
                self.job.strip(model)
        (command,) = self.commands()
        call("fairseq_alma.cli.ensemble:main", command.arguments, files=work.locks)
        return {}


class Test(TextStep):
    """Tests what predicts after the stage, on ``valid``, ``test``, and what is held out of each arrival so far."""

    @property
    def splits(self) -> list[str]:
        """What is tested on."""
        return [*TEST_SPLITS, *self.job.holdouts(range(self.plan.stage.last_arrival + 1))]

    def commands(self) -> Sequence[Command]:
        """Return the stock command for each split."""
        (predictor,) = self.job.predictors(self.job.folder, self.plan)
        return [self.evaluation(predictor, split) for split in self.splits]

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Test all splits in one process; of an ensemble only new members, as what others predict is kept."""
        (predictor,) = self.job.predictors(self.job.folder, self.plan)
        kept: tuple[str, ...] = ()
        if self.plan.combine != "single":
            before = self.job.folder.stage_folder(self.plan.stage.index - 1) / PREDICTIONS_FILE
            known = ("--known", str(before)) if self.plan.stage.index else ()
            kept = (*known, "--out", str(self.here / PREDICTIONS_FILE))
        found = self.test(work, predictor, self.splits, self.log("test"), kept)
        shown: dict[str, Any] = {split: found[split] for split in TEST_SPLITS}
        before_it = (Before(self.job, self.plan)._read() or {}).get("holdouts") or {}
        holdouts = [
            {"megabatch": t, **found[name], "before": before_it.get(name)}
            for t in range(self.plan.stage.last_arrival + 1)
            if (name := holdout_name(t)) in found
        ]
        return {**shown, "holdouts": holdouts} if holdouts else shown


@once_per_file
def read_progress(path: Path) -> Progress:
    """Return how far a checkpoint is."""
    return call("fairseq_alma.text.stage_checkpoints:read_progress", path)


@once_per_file
def _facts(path: Path) -> "ModelFacts":
    return call("fairseq_alma.checkpoints.model_facts:describe_checkpoint", path)
