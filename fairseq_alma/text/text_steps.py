"""A stage of ``alma-stream`` on text as a list of steps, each stock commands in processes of their own.

What ``--dry-run`` prints, what runs, and whether a model is there: all of it is asked of the same steps.
"""

import contextlib
import math
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping, Optional, Sequence

from msgspec import to_builtins

import fairseq_alma
from fairseq_alma.checkpoints import LAST_CHECKPOINT
from fairseq_alma.checkpoints.model_options import from_weights
from fairseq_alma.data.stream import holdout_name, slice_name
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import as_record, once_per_file, read_json_object, write_json_atomically
from fairseq_alma.learners.learner import ModelId, StagePlan, Training
from fairseq_alma.options import GivenOption
from fairseq_alma.runs.loop import StageWork, Step
from fairseq_alma.runs.records import TextGrowth
from fairseq_alma.runs.run_folder import BEST, BRANCH, PREDICTIONS_FILE
from fairseq_alma.runs.study import SAVE_EVERY_UPDATES, seconds_of
from fairseq_alma.text import stage_checkpoints
from fairseq_alma.text.process import Command, module_command, run_logged, watch_fairseq
from fairseq_alma.text.stage_checkpoints import Progress
from fairseq_alma.text.train_options import replace_option
from fairseq_alma.training.average import write_average
from fairseq_alma.watch.progress import StageProgress
from fairseq_alma.watch.sinks import CURVE_OPTIONS, TENSORBOARD

if TYPE_CHECKING:
    from fairseq_alma.checkpoints.model_facts import ModelFacts
    from fairseq_alma.text.text_job import TextJob

NEVER = 1_000_000_000
NUM_LOG_LINES = 100
MAX_LOG_INTERVAL = 25
TEST_SPLITS = ("valid", "test")
MATRIX = "matrix"
"""Stands for the held-out and the training slice of every mega-batch, where `split_losses` is told its splits."""
WHOLE, UP_TO_BRANCH = "whole", "up to branch"
"""Parts of a training; the third is `BRANCH`, which is also the folder of what branches off."""
TOTAL = "--total-num-update"
GROWTH_RECORD = "growth.json"
"""What was measured right after growth: when the weights before growth are gone, it cannot be measured again."""
_EVAL_RESULT = re.compile(r"Loss \(base 2\): (\S+), Perplexity: (\S+)")
_SPLIT_RESULT = re.compile(r"([\w/-]+): (\S+) bits per token$")

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

    def by_hand(self) -> Sequence[Sequence[str]]:
        """Return, for ``--dry-run``, stock commands that tell a part of what the step does."""
        return ()

    def log(self, name: str) -> Path:
        """Return the path of a log of the stage."""
        return self.job.folder.stage_folder(self.plan.stage.index) / f"{name}.log"

    def engine(self) -> Groups:
        """Return the options that any of fairseq's commands begins with."""
        return engine_of(self.job.request.stream)

    def evaluation(self, path: Path, split: str) -> Command:
        """Return the command that tests a checkpoint on a split, such as ``valid``."""
        return evaluation_of(self.job.request.stream, path, split, self.job.options.for_evaluation())

    def launch(
        self, work: StageWork, command: Command, log: Path, watch: Callable[[str], None] = lambda line: None
    ) -> None:
        """Run a command to its end; if the run's folder is moved away meanwhile, that is the error."""
        work.folder.require_in_place()
        try:
            run_logged(command, log, watch, work.locks)
        except (AlmaError, OSError):
            work.folder.require_in_place()
            raise

    def evaluate(self, work: StageWork, command: Command, what: str, log: Path) -> dict[str, float]:
        """Return loss (bits per token, 4 decimals as fairseq prints them) and perplexity."""
        work.display.say(work.plan, f"testing on {what}")
        loss = loss_of(lambda watch: self.launch(work, command, log, watch), what, log)
        return {"loss": loss, "ppl": round(2**loss, 4)}


def engine_of(stream: Path) -> Groups:
    """Return the options that any of fairseq's commands on a stream begins with."""
    plugin = Path(fairseq_alma.__file__).parent
    return [(str(stream),), ("--user-dir", str(plugin), "--task", "alma_lm")]


def evaluation_of(stream: Path, path: Path, split: str, options: Sequence[GivenOption]) -> Command:
    """Return the command that tests a checkpoint on a split of a stream, such as ``valid``."""
    groups = [*engine_of(stream), ("--path", str(path), "--gen-subset", split), ("--log-format", "simple")]
    return Command("fairseq-eval-lm", (*groups, *((name, *values) for name, values in options)))


def loss_of(launch: Callable[[Callable[[str], None]], None], what: str, log: Path) -> float:
    """Return the loss that fairseq-eval-lm prints, bits per token.

    Args:
        launch: runs it, and hands each line of its log to a function.
        what: is tested on.
        log: what it prints.

    Raises:
        AlmaError: it printed none, or no number.
    """
    results: list[float] = []

    def watch(line: str) -> None:
        if match := _EVAL_RESULT.search(line):
            results.append(float(match[1]))

    launch(watch)
    if len(results) != 1:
        raise AlmaError(f"{log}: fairseq-eval-lm printed {len(results)} results, one is needed; read the log")
    return require_number(results[0], what, log)


def require_number(loss: float, what: str, log: Path) -> float:
    """Return a loss in bits per token; raise AlmaError, which names the log, if its perplexity is no number."""
    # From 2 ** 1024 on, the perplexity of a loss that is a number is none; fairseq prints it as inf.
    if not math.isfinite(loss) or loss >= sys.float_info.max_exp:
        raise AlmaError(
            f"{log}: the loss on {what} is {loss}, so the training diverged; start a new --run with a lower "
            "--lr, more --warmup-updates or --clip-norm"
        )
    return loss


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
        """Tell whether what grows is there, or not needed any more. What is there is whole."""
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
            self.grow(work)
        return {}

    def grow(self, work: StageWork) -> None:
        """Grow, whatever became of what had grown."""
        self.require_start()
        growth = self.training.growth
        assert growth is not None
        what = [f"{growth.num_new} experts ({growth.method})"] if growth.num_new else []
        what += [f"layers up to {growth.layers}"] if growth.layers is not None else []
        work.display.say(work.plan, f"adding {' and '.join(what)}", self.training)
        (command,) = self.commands()
        self.launch(work, command, self.log("grow"))


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
        """Tell whether it is trained to its end. Raises AlmaError if its checkpoint is damaged."""
        last, best = self.folder / LAST_CHECKPOINT, self.folder / BEST
        return (
            stage_checkpoints.is_whole(last)
            and stage_checkpoints.read_progress(last).has_reached(*self.limits)
            and (not self.job.keeps_best or stage_checkpoints.is_whole(best))
        )

    def commands(self) -> Sequence[Command]:
        """Return the call of fairseq-train; given again after a kill, it resumes."""
        request, model = self.job.request, self.training.model
        data = ("--megabatch", str(self.plan.stage.last_arrival), "--wait", str(request.iid or request.wait))
        groups: Groups = [
            *self.engine(),
            (*data, "--replay") if request.replay else data,
            ("--seed", str(self.training.seed), "--save-dir", str(self.folder)),
        ]
        if request.num_procs > 1:
            groups.append(("--distributed-world-size", str(request.num_procs)))
        groups += [*self._start(), *self._features(), *self._saving(), *self._reporting()]
        groups += [self._own_curves(option) for option in self._model()]
        environment = self.job.options.live.wandb_environment(self.job.folder, model)
        return [Command("fairseq-train", tuple(groups), environment, request.num_procs)]

    def _start(self) -> Groups:
        """Return the options that name what the training begins with."""
        job, training = self.job, self.training
        if self.part == BRANCH:
            path = job.folder.checkpoint(training.model)
            return [("--continue-once", str(path), "--continue-as", "branch")]
        if training.start is None:
            beginning = job.request.beginning
            return [] if beginning is None else [from_weights(beginning)]
        path = job.grown(training.model) if training.growth else job.begins_from(training.start)
        if job.carries_optimizer:
            return [("--continue-once", str(path), "--continue-as", "stage")]
        return [from_weights(path)]

    def _features(self) -> Groups:
        """Return the options of what the training does beside learning."""
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
        if training.num_layers is not None:
            options = [*options, ("--decoder-layers", (str(training.num_layers),))]
        if training.num_experts is not None:
            options = [*options, ("--num-experts", (str(training.num_experts),))]
        return options

    def _own_curves(self, option: GivenOption) -> tuple[str, ...]:
        """Return an option as one group; the curves of each model go into a folder of their own."""
        name, values = option
        live = self.job.options.live
        if name == TENSORBOARD:
            return (name, str(live.curves(self.job.folder, self.training.model)))
        return (name, *values)

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Train to the end, unless that is done; return what it took."""
        done = self._train(work)
        if self.part == UP_TO_BRANCH:  # the whole counts it too
            return {}
        flops = _facts(self.folder / LAST_CHECKPOINT).train_flops_per_token
        share = {"train_tokens": done.train_tokens, "train_flops": done.train_tokens * flops}
        return share if self.part == BRANCH else {"num_updates": done.num_updates, **share, **self._described(done)}

    @property
    def own_log(self) -> Path:
        """The log of fairseq-train."""
        return self.log(f"train-member-{self.training.model.member}" + ("-branch" if self.part == BRANCH else ""))

    def _train(self, work: StageWork) -> Progress:
        """Train, unless that is done; return how far it is."""
        self._forget_what_is_lost()
        last = stage_checkpoints.repair_last(self.folder)
        before = stage_checkpoints.read_progress(last) if last else Progress(0, 0, 0)
        if last and before.has_reached(*self.limits):
            self._synchronise()
            return before
        self.require_start()
        log = self.own_log
        with work.display.training(self.plan, self.training, self.limits[0], before.num_updates) as progress:
            self.launch(work, self._resuming(before), log, self._watch(progress))
        return self._require_end(log)

    def _watch(self, progress: StageProgress) -> Callable[[str], None]:
        """Return what shows the lines of the training's log."""
        first_update = self.job.first_update(self.training, self.part)
        return watch_fairseq(progress, self.job.words_per_token, self.limits[1], first_update)

    def _resuming(self, done: Progress) -> Command:
        """Return the command; its curves resume from the updates that are done."""
        (command,) = self.commands()
        if self.part == BRANCH:
            return command
        live, place = self.job.options.live, (self.job.folder, self.training.model)
        live.rewind(*place, done.num_updates and done.first_update + done.num_updates)
        return replace(command, environment={**command.environment, **live.wandb_identity(*place)})

    def _described(self, done: Progress) -> dict[str, Any]:
        """Return what stage.json says of how the stage began and of what is tested; nothing for the paper's way."""
        features = self.job.features
        described = features.describe(self.job.part(self.training, self.part))
        return {"anytime": {"first_update": done.first_update, **described}} if described else {}

    def _forget_what_is_lost(self) -> None:
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
        if not branch.is_done() and split is not None and stage_checkpoints.read_progress(last).num_updates > split:
            stage_checkpoints.remove_all(branch.folder)
            stage_checkpoints.remove_all(self.folder)

    def _require_end(self, log: Path) -> Progress:
        """Return how far the training got; raise AlmaError unless that is its end."""
        last = self.folder / LAST_CHECKPOINT
        if not stage_checkpoints.is_whole(last):
            raise AlmaError(f"{log}: fairseq-train ended without a checkpoint; read the log")
        after = stage_checkpoints.read_progress(last)
        if not after.has_reached(*self.limits):
            raise AlmaError(
                f"{log}: fairseq-train ended after {after.num_updates} updates and {after.num_epochs} epochs, before "
                "--max-update or --max-epoch; read the log"
            )
        self._synchronise()
        return after

    def _synchronise(self) -> None:
        """See to it that what a training ends with is on the disk, before any stage.json says that it is there."""
        stage_checkpoints.synchronise(self.folder / LAST_CHECKPOINT)
        if self.job.keeps_best and (self.folder / BEST).is_file():
            stage_checkpoints.synchronise(self.folder / BEST)


@dataclass(frozen=True)
class Average(TrainingStep):
    """Makes a checkpoint of the averaged weights of a trained model."""

    def is_done(self, model: Optional[ModelId] = None) -> bool:
        """Tell whether it is there, undamaged."""
        return stage_checkpoints.is_sound(self.job.predicting(self.training.model))

    def commands(self) -> Sequence[Command]:
        """Return what does as `run` does, in a process of its own."""
        last, average = self.job.folder.checkpoint(self.training.model), self.job.predicting(self.training.model)
        return [Command("alma-ensemble", ((str(last), "--average", "--out", str(average), "--force"),))]

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Make it, unless it is there."""
        if not self.is_done():
            model = self.training.model
            write_average(self.job.folder.checkpoint(model), self.job.predicting(model))
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


@dataclass(frozen=True)
class TestGrowth(TextStep):
    """Tests a model right after growth, before its training, on ``valid``.

    Where other weights are tested at an arrival than those that grow, these too, as they were before growth.
    """

    training: Training

    @property
    def note(self) -> Path:
        """Where the figures stand: a stage that runs again may have lost what grew."""
        return self.job.folder.stage_folder(self.plan.stage.index) / GROWTH_RECORD

    def is_done(self, model: Optional[ModelId] = None) -> bool:
        """Tell whether it was measured."""
        return self._read() is not None

    def commands(self) -> Sequence[Command]:
        """Return the tests, after growth and before it."""
        start = self.training.start
        assert start is not None, self.training
        paths = [self.job.grown(self.training.model)]
        if (before := self.job.begins_from(start)) != self.job.predicting(start):
            paths.append(before)
        return [self.evaluation(path, "valid") for path in paths]

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Return the figures, measured once."""
        figures = self._read()
        if figures is None:
            grow = Grow(self.job, self.plan, self.training)
            if not self.job.grown(self.training.model).is_file():
                grow.grow(work)
            whens = (("valid", "after"), ("before", "before"))
            figures = {
                name: self.evaluate(work, command, f"valid right {when} growth", self.log(f"valid-{when}-growth"))
                for (name, when), command in zip(whens, self.commands(), strict=False)
            }
            write_json_atomically(self.note, figures)
        shown = {"before_growth": figures.get("before"), "after_growth": figures["valid"]}
        return {name: {"valid": result} for name, result in shown.items() if result is not None}

    def _read(self) -> Optional[dict[str, Any]]:
        with contextlib.suppress(AlmaError, FileNotFoundError):
            return to_builtins(as_record(read_json_object(self.note, ""), TextGrowth, self.note, ""))
        return None


class Join(TextStep):
    """Makes one checkpoint of all that predicts after the stage."""

    def commands(self) -> Sequence[Command]:
        """Return the call of alma-ensemble that does as `run` does."""
        predictor, _ = self.job.predictor(self.job.folder, self.plan)
        members = tuple(str(self.job.predicting(model)) for model in self.plan.predictors)
        return [Command("alma-ensemble", (members, ("--out", str(predictor), "--force")))]

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Join the members. The file has their checksums: they must have their final form before."""
        # Imports torch, which takes seconds; a finished run needs none of it.
        from fairseq_alma.checkpoints.checkpoint_file import write_checkpoint
        from fairseq_alma.checkpoints.ensemble_file import join_checkpoints

        if not self.job.request.keep_checkpoints:
            for model in self.plan.predictors:
                self.job.strip(model)
        work.folder.require_in_place()
        predictor, _ = self.job.predictor(self.job.folder, self.plan)
        members = [self.job.predicting(model) for model in self.plan.predictors]
        write_checkpoint(join_checkpoints(members, [1.0] * len(members), predictor), predictor)
        return {}


class Test(TextStep):
    """Tests what predicts after the stage, on ``valid``, ``test``, and slices of all mega-batches if asked to."""

    @property
    def splits(self) -> list[str]:
        """What is tested on."""
        slices = [name(t) for name in (holdout_name, slice_name) for t in range(self.job.num_slices)]
        return [*TEST_SPLITS, *slices]

    def commands(self) -> Sequence[Command]:
        """Return the one call that tests on all splits."""
        predictor, _ = self.job.predictor(self.job.folder, self.plan)
        subset = ",".join([*TEST_SPLITS, *([MATRIX] if self.job.num_slices else [])])
        command = module_command("fairseq_alma.text.split_losses", self.evaluation(predictor, subset).groups)
        if self.plan.combine == "single":
            return [command]
        known = [] if self.plan.stage.index == 0 else ["--known", str(self._kept(self.plan.stage.index - 1))]
        kept = (*known, "--out", str(self._kept(self.plan.stage.index)))
        return [replace(command, groups=(*command.groups, kept))]

    def _kept(self, stage: int) -> Path:
        return self.job.folder.stage_folder(stage) / PREDICTIONS_FILE

    def by_hand(self) -> Sequence[Sequence[str]]:
        """Return the call of fairseq-eval-lm that finds the same on one split; of an ensemble it tests all members."""
        predictor, _ = self.job.predictor(self.job.folder, self.plan)
        command = self.evaluation(predictor, TEST_SPLITS[-1])
        return [[command.program, *command.arguments]]

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Test; losses on slices are in bits per token."""
        losses: dict[str, float] = {}

        def watch(line: str) -> None:
            if match := _SPLIT_RESULT.search(line):
                losses[match[1]] = float(match[2])

        log = self.log("test")
        work.display.say(work.plan, f"testing on {', '.join(TEST_SPLITS)}{' and slices' * bool(self.job.num_slices)}")
        (command,) = self.commands()
        self.launch(work, command, log, watch)
        if lacking := [split for split in self.splits if split not in losses]:
            raise AlmaError(f"{log}: no loss on {lacking[0]} was printed; read the log")
        found = [require_number(losses[split], split, log) for split in self.splits]
        shown: dict[str, Any] = {
            split: {"loss": loss, "ppl": round(2**loss, 4)} for split, loss in zip(TEST_SPLITS, found, strict=False)
        }
        if slices := found[len(TEST_SPLITS) :]:
            half = self.job.num_slices
            shown["matrix"] = {"held_out": slices[:half], "training": slices[half:]}
        return shown


@once_per_file
def _facts(path: Path) -> "ModelFacts":
    # Imports torch, which takes seconds; a dry run needs none of it.
    from fairseq_alma.checkpoints.model_facts import describe_checkpoint

    return describe_checkpoint(path)
