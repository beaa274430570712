"""Declare the options of ``alma-stream``, and compute the content of run.json from the options."""

import argparse
import contextlib
import itertools
import platform
from dataclasses import MISSING, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence, Union

from fairseq_alma.data.stream import Stream, canonical_sha256
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import MAX_MEGABATCHES
from fairseq_alma.learners.learner import (
    LEARNERS,
    MAX_SEED,
    PRESETS,
    Learner,
    Preset,
    ScheduleOptions,
    Stage,
    StagePlan,
    build_learner,
    stages,
    with_preset,
)
from fairseq_alma.options import Options, flag, integer, of_this_call, opt, options_of, real, utf8_path
from fairseq_alma.runs.curves import CURVE_OPTIONS
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.training.feature import Features
from fairseq_alma.training.features import BestCheckpoint

TEXT = ("text",)
PROCESSES = integer(1, 1024)
SAVE_EVERY_UPDATES, SAVE_EVERY_SECONDS = 500, 20  # default ``--save-every`` for text, images
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def read_size(word: str) -> Optional[int]:
    """Parse a number of parameters such as ``25M``; return None for ``auto``. Raises ValueError for other words."""
    if word == "auto":
        return None
    factor = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}.get(word[-1:].lower(), 1)
    with contextlib.suppress(ValueError):
        size = float(word[:-1] if factor > 1 else word) * factor
        if 1 <= size <= 1e12:
            return round(size)
    raise ValueError("expected a number of parameters such as 800k or 25M, or auto")


def read_interval(word: str) -> Union[int, str]:
    """Return a number of updates as int, or a duration such as ``15m`` as str. Raises ValueError for other words."""
    with contextlib.suppress(ValueError):
        return word if seconds_of(word) else int(integer().read(word))
    raise ValueError("expected a number of updates such as 500, or a time such as 90s, 15m or 2h")


def seconds_of(interval: Optional[Union[int, str]]) -> Optional[float]:
    """Convert a duration such as ``15m`` to seconds; return None for a number of updates."""
    if not isinstance(interval, str) or interval[-1:] not in _SECONDS:
        return None
    return real(0, 1e6, above=True).read(interval[:-1]) * _SECONDS[interval[-1]]


@dataclass(frozen=True, kw_only=True)
class StudyOptions(ScheduleOptions):
    """Options of a run: data, schedule, and files to keep.

    Options declared as ``free`` affect only files and logs. A resumed run may change their values.
    """

    stream: Path = of_this_call(
        MISSING, "stream written by alma-prep-text or alma-prep-images", parse=utf8_path, metavar="DIR"
    )
    run: Path = of_this_call(MISSING, "folder of the run", parse=utf8_path, metavar="DIR")
    finetune_from_model: Optional[Path] = opt(
        None, "checkpoint with initial weights (default: random weights)", kinds=TEXT, parse=utf8_path, metavar="CKPT"
    )
    then_evaluate: Optional[str] = opt(
        None, "shell command after each stage; its last output line must be a JSON object", free=True, metavar="COMMAND"
    )
    seeds: tuple[int, ...] = of_this_call(
        (1,),
        f"random seeds, 0 to {MAX_SEED:,}; with several seeds, the run of seed N is RUN/seed-N; on images only for "
        "sm, ens, gens and bagging (default: 1)",
        range=integer(0, MAX_SEED),
        flag="--seed",
    )
    preset: Optional[Preset] = of_this_call(
        None,
        "use the default values of the paper, or of its released code (images only)",
        choices=tuple(PRESETS),
        parse=PRESETS.__getitem__,
    )
    size: Optional[int] = of_this_call(
        None, "approximate number of parameters, such as 25M (default: by amount of text)", kinds=TEXT, parse=read_size
    )
    passes: Optional[float] = of_this_call(
        None,
        "passes through the mega-batches of a stage; a later call may change the number for later stages (default: 1)",
        range=real(0, 1000, above=True),
        kinds=TEXT,
        metavar="P",
    )
    save_every: Optional[Union[int, str]] = opt(
        None,
        f"checkpoint interval: updates, or a time such as 15m (default: text {SAVE_EVERY_UPDATES}, images "
        f"{SAVE_EVERY_SECONDS}s)",
        parse=read_interval,
        free=True,
        metavar="N|TIME",
    )
    keep: Optional[tuple[int, ...]] = opt(
        None, "also keep the models of these arrivals (numbered from 0)", range=integer(0), free=True, metavar="N"
    )
    keep_checkpoints: bool = opt(
        False, "keep all checkpoints (default: only checkpoints that a later stage or the report needs)", free=True
    )
    validate: bool = opt(False, "validate at each checkpoint; fairseq-train logs the loss", kinds=TEXT, free=True)
    features_from: Optional[str] = of_this_call(
        None, "Python file or folder that registers training features", metavar="PATH"
    )
    learners_from: Optional[str] = of_this_call(None, "Python file or folder that registers learners", metavar="PATH")


@dataclass(frozen=True, kw_only=True)
class PartOptions(Options):
    """Options that restrict a call of ``alma-stream`` to one stage or to a dry run."""

    stage: Optional[int] = of_this_call(
        None, "run only this stage (numbered from 0); the models that it needs must be trained"
    )
    dry_run: bool = of_this_call(False, "print the commands of each stage and run nothing")
    megabatches: Optional[int] = of_this_call(
        None,
        "require B or more mega-batches; with --dry-run, a stream of text need not exist",
        range=integer(1, MAX_MEGABATCHES),
        metavar="B",
    )


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(Options):
    """Options for training with several processes."""

    num_procs: int = of_this_call(
        1,
        "number of data-parallel processes for each model; --update-freq is divided by this number (default: 1)",
        range=PROCESSES,
        kinds=TEXT,
    )
    jobs: Optional[int] = of_this_call(
        None,
        "{learners}: number of members to train in parallel; each member uses --num-procs GPUs",
        range=PROCESSES,
        trait="trains_members_alone",
    )
    member: Optional[tuple[int, ...]] = of_this_call(
        None,
        "{learners}: train only these members (numbered from 0); then run with --jobs 1 to complete the stage",
        trait="trains_members_alone",
        metavar="I",
    )


NEW_FIRST = "new_first"  # key of run.json that may change between stages; reports compare the first stage's value
BATCH_OPTIONS = ("--batch-size", "--max-tokens", "--update-freq")
# Keys of run.json that a resumed run may change; they affect files, logs and batches, but not the sequence order.
FREE_OPTIONS = (
    *(name for name, option in options_of(StudyOptions).items() if option.free),
    *("--log-interval", "--num-workers", "--checkpoint-activations", *BATCH_OPTIONS, *CURVE_OPTIONS, NEW_FIRST),
)
ROUNDING_OPTIONS = ("jobs",)  # keys of run.json that a resumed run may not change (rounding); reports ignore them
OPTION_OF = {"best_every": "--save-every"}  # key of run.json -> flag, if it is not the name of the key


def describe_run(
    learner: str, seed: int, options: Mapping[str, Any], train_options: Mapping[str, Any], stream: Stream
) -> dict[str, Any]:
    """Return the content of run.json for the ``options`` before ``--`` and the ``train_options`` after ``--``."""
    counts = ("num_tokens", "num_bytes", "num_images")
    own: dict[str, Any] = {"decontaminated": stream.decontaminated} if stream.kind == "text" else {}
    if stream.images is not None:
        own = {
            "dataset": stream.images.dataset,
            "num_classes": stream.images.num_classes,
            "source": canonical_sha256([file.sha256 for file in stream.images.files]),  # the same for every seed
            "seed": stream.seed,
            "augment": stream.images.augment,
        }
    return {
        "learner": learner,
        "seed": seed,
        "options": dict(options),
        "train_options": dict(train_options),
        "stream": {
            "path": str(stream.root),
            "fingerprint": stream.fingerprint,
            "kind": stream.kind,
            "num_megabatches": stream.num_megabatches,
            "vocab_size": stream.tokenizer.vocab_size if stream.tokenizer else None,
            **own,
            **{name: {count: getattr(stream.split(name), count) for count in counts} for name in ("valid", "test")},
        },
        "versions": versions(),
    }


def planned_stages(record: Mapping[str, Any], num_megabatches: int) -> list[Stage]:
    """Return the stages of a run for the options in run.json and the current number of mega-batches."""
    options = record["options"]
    if (iid := options.get("iid")) is not None:
        return stages(num_megabatches, iid)[:1]
    return stages(num_megabatches, options["wait"], options["replay"], options["drop_rest"], options.get("first_wait"))


def versions() -> dict[str, Optional[str]]:
    """Return the versions of Python, torch, fairseq and this package, without importing the packages."""
    found = {"python": platform.python_version(), "torch": None, "fairseq": None, "fairseq_alma": None}
    for distribution in ("torch", "fairseq", "fairseq-fixed", "ve-fairseq", "fairseq-alma"):
        name = "fairseq" if distribution in ("fairseq-fixed", "ve-fairseq") else distribution.replace("-", "_")
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(distribution)
    return found


def require_same_run(path: str, before: Mapping[str, Any], now: Mapping[str, Any], stream: Stream) -> list[str]:
    """Check that a command may resume a run; return a note for each package version that differs.

    Args:
        path: path of run.json, for messages.
        before: content of run.json.
        now: content of run.json for the new command.
        stream: stream of the new command.

    Raises:
        AlmaError: options or streams differ; the message contains the differences.
    """
    found = [(f"--{name}", before[name], now[name]) for name in ("learner", "seed")]
    fixed: set[str] = set() if stream.kind == "text" else {"--batch-size"}  # on images, an update is one batch
    for part in ("options", "train_options"):
        for name in sorted({*before[part], *now[part]} - (set(FREE_OPTIONS) - fixed)):
            old, new = before[part].get(name), now[part].get(name)
            # A stream that grows adds stages, so a schedule "experts=4,6" may be extended to "experts=4,6,8".
            sizes = itertools.zip_longest(str(old).split(), str(new).split())
            if name != "grow_schedule" or not all(f"{b},".startswith(f"{a},") for a, b in sizes):
                found.append((OPTION_OF.get(name, flag(name) if part == "options" else name), old, new))
    changed = [
        f"{name} changed from {' to '.join('not given' if v is None else str(v) or 'given' for v in (old, new))}"
        for name, old, new in found
        if old != new
    ]
    if not changed and before.get("start") != now.get("start"):
        changed = [f"the content of {now['options']['finetune_from_model']} changed"]
    if changed:
        raise AlmaError(f"{path}: expected the recorded options ({'; '.join(changed)}); give these, or another --run")
    if not is_begun_on(before, stream):
        raise AlmaError(
            f"{path}: expected the stream of the run ({before['stream']['path']}, fingerprint "
            f"{before['stream']['fingerprint'][:12]}), found {stream.root}; give the recorded stream, or another --run"
        )
    then = before.get("versions", {})
    return [
        f"note: {path}: begun with {name} {then.get(name)}, resumed with {version}; results may differ by rounding"
        for name, version in now["versions"].items()
        if then.get(name) != version
    ]


def is_begun_on(record: Mapping[str, Any], stream: Stream) -> bool:
    """Return whether a run was begun on a stream. The stream may have received new mega-batches since then."""
    known = record["stream"]["num_megabatches"]
    return known <= stream.num_megabatches and stream.fingerprint_of_first(known) == record["stream"]["fingerprint"]


@dataclass(frozen=True, kw_only=True)
class RunRequest(StudyOptions, PartOptions, ProcessOptions):
    """Options of a call of alma-stream.

    Attributes:
        learner: class of the learner.
        learner_options: values of learner options that the user or the preset gives, by field name.
        overridden: flags of the preset options that the user overrides.
        features: training features.
    """

    learner: type[Learner]
    learner_options: Mapping[str, Any]
    overridden: tuple[str, ...] = ()
    features: Features = field(default_factory=Features)

    @classmethod
    def of(cls, arguments: argparse.Namespace, learner: type[Learner], options: Mapping[str, Any]) -> "RunRequest":
        """Build the request from parsed arguments. A preset sets learner options that the user does not give."""
        of_preset = {} if arguments.preset is None else arguments.preset.learners.get(learner.name, {})
        options, names = with_preset(options, of_preset)
        return cls.read(
            arguments,
            learner=learner,
            learner_options=options,
            overridden=tuple(map(flag, names)),
            features=Features.read(arguments),
        )

    def check(self, kind: str) -> None:
        """Raise ValueError if options conflict; ``kind``: ``text`` or ``images``. The message begins with an option."""
        if len({*self.seeds}) < len(self.seeds):
            raise ValueError(f"--seed {' '.join(map(str, self.seeds))}: repeated seed; give each seed once")
        given = [name for name in ("member", "jobs") if getattr(self, name) is not None]
        if len(self.seeds) > 1:
            if given:
                raise ValueError(f"{flag(given[0])} requires one seed, found {len(self.seeds)} seeds; give one --seed")
            if kind == "images" and not self.learner.stacks_seeds:
                possible = ", ".join(sorted(name for name, each in LEARNERS["images"].items() if each.stacks_seeds))
                raise ValueError(
                    f"--seed: several seeds on images require --learner {possible}, found {self.learner.name}"
                )
        if len(given) == 2:
            raise ValueError("--jobs (all members) and --member (some members) exclude each other; remove one")
        if self.iid is not None:
            defaults = {"wait": 1, "first_wait": None, "replay": False, "drop_rest": False}
            if changed := [flag(name) for name, default in defaults.items() if getattr(self, name) != default]:
                raise ValueError(f"--iid {self.iid} trains in one stage; remove {' and '.join(changed)}")
        if self.first_wait is not None and self.wait != 1:
            raise ValueError(f"--first-wait {self.first_wait} requires --wait 1, found {self.wait}; remove --wait")
        if kind == "images" and isinstance(self.save_every, int):
            raise ValueError(f"--save-every {self.save_every}: expected a time on images; give 30s or 15m, for example")
        if isinstance(self.save_every, str) and self.features[BestCheckpoint].best_checkpoint:
            raise ValueError(
                f"--save-every {self.save_every}: expected a number of updates with --best-checkpoint, because a time "
                "makes results depend on the machine; give a number such as 500"
            )

    def record(self, kind: Optional[str] = None) -> dict[str, Any]:
        """Return the options for run.json, without the options of the learner."""
        given = super().record(kind) | self.features.record(kind)
        if self.features[BestCheckpoint].best_checkpoint:
            given["best_every"] = self.save_every or SAVE_EVERY_UPDATES  # because this interval affects results
        if kind == "images" and self.trains_members_separately:  # because this affects rounding
            given["jobs"] = 1  # for any number
        return given

    @property
    def trains_members_separately(self) -> bool:
        """Return whether each member is trained separately (``--jobs`` or ``--member``)."""
        return self.jobs is not None or self.member is not None

    def folder(self, seed: int) -> RunFolder:
        """Return the run folder of a seed: ``--run``, or ``seed-N`` in ``--run`` if there are several seeds."""
        return RunFolder(self.run if len(self.seeds) == 1 else self.run / f"seed-{seed}")

    def build_learner(self, kind: str, seed: int) -> Learner:
        return build_learner(self.learner, kind, seed, self.wait, self.learner_options)

    def plan(self, learner: Learner, num_megabatches: int) -> list[StagePlan]:
        """Return one plan per stage. Raises ValueError if an option is invalid; the message begins with the option."""
        planned = self.stages(num_megabatches)
        if self.keep and max(self.keep) >= num_megabatches:
            raise ValueError(f"--keep {max(self.keep)}: expected arrivals of the stream (0 to {num_megabatches - 1})")
        if self.keep and min(self.keep) < (first := planned[0].arrivals[-1]):
            raise ValueError(f"--keep {min(self.keep)}: expected arrivals with a model, the first is {first}")
        if self.stage is not None and not 0 <= self.stage < len(planned):
            raise ValueError(f"--stage {self.stage}: expected a stage of the run (0 to {len(planned) - 1})")
        learner.check_stages(planned)
        plans = [learner.plan(stage) for stage in planned]
        trainings = [training for plan in self.chosen(plans) for training in plan.trainings]
        awaited = [(each.start, each.model) for each in trainings if each.start in {other.model for other in trainings}]
        if (self.jobs or 1) > 1 and any(start and start.member != model.member for start, model in awaited):
            raise ValueError(f"--jobs {self.jobs}: a member starts from the weights of another member; give --jobs 1")
        members = sorted({training.model.member for training in trainings})
        for member in self.member or ():
            if member not in members:
                where = "the run" if self.stage is None else f"stage {self.stage}"
                raise ValueError(f"--member {member}: expected a member of {where} ({', '.join(map(str, members))})")
        return plans

    def chosen(self, plans: Sequence[StagePlan]) -> list[StagePlan]:
        return [plan for plan in plans if self.stage in (None, plan.stage.index)]

    def stages(self, num_megabatches: int) -> list[Stage]:
        """Return the stages of a run. Raises ValueError if the stream has too few mega-batches."""
        if self.iid is not None and self.iid > num_megabatches:
            raise ValueError(f"--iid {self.iid}: the stream has only {num_megabatches} mega-batches; reduce --iid")
        planned = planned_stages({"options": vars(self)}, num_megabatches)
        if not planned:
            name = "--wait" if self.first_wait is None else "--first-wait"
            raise ValueError(
                f"{name} {self.first_wait or self.wait} --drop-rest: the stream has only {num_megabatches} "
                f"mega-batches; reduce {name}"
            )
        return planned
