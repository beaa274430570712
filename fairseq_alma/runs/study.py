"""What ``alma-stream`` was asked for: its own options, each declared here once, and the request that they come to.

What run.json names, and what binds a run to it, follows from the declarations; see `fairseq_alma.options`. Here too is
what else run.json says, whether a command may resume the run that it describes, and what each kind of data makes of a
request (`Job`).
"""

import argparse
import contextlib
import math
import platform
from dataclasses import MISSING, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Protocol, Sequence, Union

from fairseq_alma.data.stream import Split, Stream, canonical_sha256
from fairseq_alma.errors import AlmaError, refuse_no_file
from fairseq_alma.files import MAX_MEGABATCHES
from fairseq_alma.learners.learner import (
    LEARNERS,
    MAX_SEED,
    Learner,
    ScheduleOptions,
    Stage,
    StagePlan,
    build_learner,
    plan_stages,
    stages,
)
from fairseq_alma.learners.presets import PRESETS, Preset, filled
from fairseq_alma.options import Options, flag, integer, of_this_call, opt, options_of, real, utf8_path
from fairseq_alma.runs.loop import Backend, Run
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.training.best_checkpoint import BestCheckpoint
from fairseq_alma.training.feature import Features
from fairseq_alma.watch.arrivals import CURVE_OPTIONS

TEXT, IMAGES = ("text",), ("images",)
MEMBERS_ALONE = "trains_members_alone"
PROCESSES = integer(1, 1024)
FEATURES_FROM = "--features-from"
LEARNERS_FROM = "--learners-from"  # not --user-dir: fairseq's parser looks for that in the command line of any process


AUTO = "auto"
_LARGEST_SIZE = 10**12
SAVE_EVERY_UPDATES = 500
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def read_size(word: str) -> Optional[int]:
    """Return a number of parameters, ``25M``; None: auto. Raises ValueError with what is needed."""
    if word == AUTO:
        return None
    digits, factor = word, 1.0
    if word and word[-1] in "kKmMgGbB":
        digits, factor = word[:-1], {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}[word[-1].lower()]
    try:
        size = float(digits) * factor
    except ValueError:
        size = math.nan
    if not 1 <= size <= _LARGEST_SIZE:
        raise ValueError("a number of parameters such as 800k or 25M is needed, or auto")
    return round(size)


def read_interval(word: str) -> Union[int, str]:
    """Return a number of updates, or a time, ``15m``, as it stands. Raises ValueError with what is needed."""
    with contextlib.suppress(ValueError):
        if word[-1:] not in _SECONDS:
            return int(integer().read(word))
        if seconds_of(word):
            return word
    raise ValueError("a number of updates such as 500 is needed, or a time such as 90s, 15m or 2h")


def seconds_of(interval: Optional[Union[int, str]]) -> Optional[float]:
    """Return how long an interval is that is a time; None: it counts updates, or is the default."""
    if not isinstance(interval, str):
        return None
    return real(0, 1e6, above=True).read(interval[:-1]) * _SECONDS[interval[-1]]


def _free(default: Any, help: str, **further: Any) -> Any:
    """Declare an option that changes what is kept or shown: a run may be resumed with another value."""
    return opt(default, help, free=True, **further)


@dataclass(frozen=True, kw_only=True)
class StudyOptions(ScheduleOptions):
    """What a run is: its data, its schedule, what it keeps."""

    stream: Path = of_this_call(MISSING, "stream of alma-prep-text or alma-prep-images", parse=utf8_path, metavar="DIR")
    run: Path = of_this_call(MISSING, "folder of the run; made if it is not there", parse=utf8_path, metavar="DIR")
    finetune_from_model: Optional[Path] = opt(
        None,
        "checkpoint with the weights to begin with (default: random weights)",
        kinds=TEXT,
        parse=utf8_path,
        metavar="CKPT",
    )
    then_evaluate: Optional[str] = _free(
        None,
        "shell command after each stage; its last line is a JSON object of figures. {checkpoint}, {export}, {stage}, "
        "{arrival}, {run} and {stream} are replaced",
        metavar="COMMAND",
    )
    seeds: tuple[int, ...] = of_this_call(
        (1,),
        f"random seeds, 0 to {MAX_SEED:,}; several are a run each, RUN/seed-N (default: 1)",
        range=integer(0, MAX_SEED),
        flag="--seed",
    )
    preset: Optional[Preset] = of_this_call(
        None,
        "named settings for what is not given; "
        + "; ".join(f"{preset.name}, {preset.help}" for preset in PRESETS.values()),
        choices=tuple(PRESETS),
        parse=PRESETS.__getitem__,
    )
    size: Optional[int] = of_this_call(
        None,
        "number of parameters, such as 800k or 25M (default: auto, by the amount of text)",
        kinds=TEXT,
        parse=read_size,
    )
    passes: Optional[float] = of_this_call(
        None,
        "passes of a stage through its mega-batches; may differ in a later stage (default: 1)",
        range=real(0, 1000, above=True),
        kinds=TEXT,
        metavar="P",
    )
    save_every: Optional[Union[int, str]] = _free(
        None,
        f"checkpoint interval, updates or a time such as 15m (default: {SAVE_EVERY_UPDATES} updates, images 20s)",
        parse=read_interval,
        metavar="N|TIME",
    )
    keep: Optional[tuple[int, ...]] = _free(
        None, "keep the model after these arrivals, from 0", range=integer(0), metavar="ARRIVAL"
    )
    keep_checkpoints: bool = _free(False, "keep all checkpoints; default: what a later stage or the report needs")
    validate: bool = _free(False, "let fairseq-train validate when it saves, for its log", kinds=TEXT)
    features_from: Optional[str] = of_this_call(
        None, "Python file or folder that registers training features", metavar="PATH"
    )
    learners_from: Optional[str] = of_this_call(
        None, "Python file or folder that registers learners", flag=LEARNERS_FROM, metavar="PATH"
    )

    @property
    def beginning(self) -> Optional[Path]:
        """The checkpoint that the run begins with; None: random weights."""
        return self.finetune_from_model

    def require_beginning(self) -> None:
        """Raise AlmaError unless what the run is to begin with is a file."""
        if self.beginning is not None:
            refuse_no_file(self.beginning, "--finetune-from-model", "give a checkpoint of alma-import or fairseq-train")
            if not self.beginning.is_file():
                raise AlmaError(f"--finetune-from-model {self.beginning}: no such checkpoint file; give another one")


@dataclass(frozen=True, kw_only=True)
class PartOptions(Options):
    """Which part of the run a call runs, if any."""

    stage: Optional[int] = of_this_call(None, "run this stage alone, from 0; the one before must be complete")
    dry_run: bool = of_this_call(False, "print the commands of each stage and run nothing")
    megabatches: Optional[int] = of_this_call(
        None,
        "least number of mega-batches of the stream; with it, a dry run needs no stream",
        range=integer(1, MAX_MEGABATCHES),
        metavar="B",
    )


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(Options):
    """Processes and devices of a call."""

    num_procs: int = of_this_call(
        1,
        "data-parallel processes that train a model; divides --update-freq; may change on resume (default: 1)",
        range=PROCESSES,
        kinds=TEXT,
    )
    jobs: Optional[int] = of_this_call(
        None,
        "{learners}: train members in N processes, on --num-procs GPUs each; any N gives the same files",
        range=PROCESSES,
        trait=MEMBERS_ALONE,
    )
    member: Optional[tuple[int, ...]] = of_this_call(
        None,
        "{learners}: train only these members, from 0; a call without it completes the stages",
        trait=MEMBERS_ALONE,
        metavar="I",
    )


BATCHING = ("--batch-size", "--max-tokens", "--update-freq", "--num-workers", "--checkpoint-activations")
FREE_OPTIONS = (
    *(name for name, option in options_of(StudyOptions).items() if option.free),
    "--log-interval",
    *BATCHING,
    *CURVE_OPTIONS,
)
"""What run.json names and does not bind a run to: it changes what is kept and shown, not what comes out; and how the
sequences of a training are cut into batches, in an order that does not depend on it (stage.json has each change)."""
ROUNDING_OPTIONS = ("jobs",)
"""It changes the last digits: a run keeps to it, a report takes no notice."""
OPTION_OF = {"best_every": "--save-every"}
"""Keys of run.json that are no option as they stand: where ``--save-every`` decides which weights are tested."""
_DISTRIBUTIONS = {
    "torch": ("torch",),
    "fairseq": ("ve-fairseq", "fairseq-fixed", "fairseq"),
    "fairseq_alma": ("fairseq-alma",),
}


def describe_run(
    learner: str, seed: int, options: Mapping[str, Any], train_options: Mapping[str, Any], stream: Stream
) -> dict[str, Any]:
    """Return the content of run.json, with the options before and after ``--``."""
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
            **({"decontaminated": stream.decontaminated} if stream.kind == "text" else {}),
            **_describe_images(stream),
            "valid": _count(stream.split("valid")),
            "test": _count(stream.split("test")),
        },
        "versions": versions(),
    }


def planned_stages(record: Mapping[str, Any], num_megabatches: int) -> list[Stage]:
    """Return the stages of the run of a run.json, on its stream as it is now."""
    options = record["options"]
    if (iid := options.get("iid")) is not None:
        return stages(num_megabatches, iid)[:1]
    first = options.get("first_wait")
    return stages(num_megabatches, options["wait"], options["replay"], options["drop_rest"], first)


def versions() -> dict[str, Optional[str]]:
    """Return the versions that results depend on, without importing anything heavy."""
    found: dict[str, Optional[str]] = {"python": platform.python_version()}
    for name, distributions in _DISTRIBUTIONS.items():
        found[name] = next((version for each in distributions if (version := _version(each)) is not None), None)
    return found


def require_same_run(path: str, before: Mapping[str, Any], now: Mapping[str, Any], stream: Stream) -> list[str]:
    """Check that a command may resume a run; return notes on versions that differ.

    Args:
        path: of run.json, for messages.
        before: its content.
        now: the content that the command would write.
        stream: as it is now; mega-batches may have been appended since the run began.

    Raises:
        AlmaError: an option or the stream differs; names it.
    """
    differences = _differences(before, now)
    then = before.get("versions", {})
    notes = [
        f"note: {path} was begun with {name} {then.get(name)}, this is {version}; the figures may differ in their last "
        "digits"
        for name, version in now["versions"].items()
        if then.get(name) != version
    ]
    if not differences and before.get("start") != now.get("start"):
        differences = [f"{now['options']['finetune_from_model']} was another file then"]
    if differences:
        raise AlmaError(
            f"{path}: the run was begun with other options ({'; '.join(differences)}); give the same options, "
            "or another --run"
        )
    if not is_begun_on(before, stream):
        raise AlmaError(
            f"{path}: the run was begun on another stream than {stream.root} ({before['stream']['path']}, fingerprint "
            f"{before['stream']['fingerprint'][:12]}); give that stream, or another --run"
        )
    return notes


def is_begun_on(record: Mapping[str, Any], stream: Stream) -> bool:
    """Return whether a run was begun on a stream, to which mega-batches may have been appended since."""
    known = record["stream"]["num_megabatches"]
    return known <= stream.num_megabatches and stream.fingerprint_of_first(known) == record["stream"]["fingerprint"]


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe each option that differs."""
    found = []
    for name in ("learner", "seed"):
        if before[name] != now[name]:
            found.append(f"--{name} {before[name]} then, {now[name]} now")
    for part, prefix in (("options", "--"), ("train_options", "")):
        for name in sorted({*before[part], *now[part]} - set(FREE_OPTIONS)):
            old, new = before[part].get(name), now[part].get(name)
            if name == "grow_schedule" and _continues(old, new):
                continue  # the stream has more stages now
            if old != new:
                option = OPTION_OF.get(name, f"{prefix}{name.replace('_', '-')}")
                found.append(f"{option} {_format(old)} then, {_format(new)} now")
    return found


def _continues(old: Any, new: Any) -> bool:
    """Tell whether a schedule begins as another one, in each of the sizes that it is of."""
    sizes, more = str(old).split(), str(new).split()
    return len(sizes) == len(more) and all(f"{b},".startswith(f"{a},") for a, b in zip(sizes, more, strict=True))


def _format(value: Any) -> str:
    if value is None:
        return "not given"
    return str(value) if value != "" else "given"


def _describe_images(stream: Stream) -> dict[str, Any]:
    """Return what a report needs of a stream of images; streams of one ``source`` differ by their order alone."""
    if stream.images is None:
        return {}
    return {
        "dataset": stream.images.dataset,
        "num_classes": stream.images.num_classes,
        "source": canonical_sha256([file.sha256 for file in stream.images.files]),
        "seed": stream.seed,
    }


def _count(split: Split) -> dict[str, int]:
    return {"num_tokens": split.num_tokens, "num_bytes": split.num_bytes, "num_images": split.num_images}


def _version(distribution: str) -> Optional[str]:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True)
class RunRequest(StudyOptions, PartOptions, ProcessOptions):
    """Options of alma-stream, each of which was checked by itself.

    Attributes:
        learner: the class.
        learner_options: what the user gave of the learner's own options.
        features: what its trainings do beside learning, what runs on from stage to stage, and which model is tested.
        overridden: options of the learner that the preset sets and that the user gave with another value.
    """

    learner: type[Learner]
    learner_options: Mapping[str, Any]
    overridden: tuple[str, ...] = ()
    features: Features = field(default_factory=Features)

    @classmethod
    def of(cls, arguments: argparse.Namespace, learner: type[Learner], options: Mapping[str, Any]) -> "RunRequest":
        """Take the arguments of the same names, and fill in what a preset says of the learner's options."""
        names: list[str] = []
        if arguments.preset is not None:
            options, names = filled(options, arguments.preset.learner_options(learner.name))
        return cls.read(
            arguments,
            learner=learner,
            learner_options=options,
            overridden=tuple(map(flag, names)),
            features=Features.read(arguments),
        )

    def check(self, kind: str) -> None:
        """Raise ValueError, which begins with the option, if options contradict each other on a kind of data."""
        self._check_seeds(kind)
        given = [name for name in ("member", "jobs") if getattr(self, name) is not None]
        if given and len(self.seeds) > 1:
            raise ValueError(f"{flag(given[0])} goes with one --seed; give one call for each seed")
        if len(given) == 2:
            raise ValueError("--jobs trains all members, --member some; give one of them")
        if self.iid is not None and (self.wait != 1 or self.replay or self.drop_rest or self.first_wait is not None):
            raise ValueError("--iid is one stage: it does not go with --wait, --first-wait, --replay or --drop-rest")
        if self.first_wait is not None and self.wait != 1:
            raise ValueError(f"--first-wait {self.first_wait}: goes with --wait 1; leave --wait out")
        if self.passes_of_new and not self.replay:
            raise ValueError("--passes-of-new: without --replay there are new mega-batches alone; give --replay too")
        if kind == "images" and isinstance(self.save_every, int):
            raise ValueError(f"--save-every {self.save_every}: on images it is a time; give one such as 30s or 15m")
        if isinstance(self.save_every, str) and self.features[BestCheckpoint].best_checkpoint:
            raise ValueError(
                f"--save-every {self.save_every}: --best-checkpoint chooses among what is saved, which must not depend "
                "on the clock; give a number of updates"
            )

    def _check_seeds(self, kind: str) -> None:
        for number, seed in enumerate(self.seeds):
            if seed in self.seeds[:number]:
                raise ValueError(f"--seed {seed}: given twice")
        if len(self.seeds) > 1 and kind == "images" and not self.learner.stacks_seeds:
            possible = ", ".join(sorted(name for name, each in LEARNERS["images"].items() if each.stacks_seeds))
            raise ValueError(f"--seed: several go with --learner {possible} on images; give one call for each")

    def record(self, kind: Optional[str] = None) -> dict[str, Any]:
        """Return what run.json says of the options, beside those of the learner."""
        given = {"iid": None} | super().record(kind) | self.features.record(kind)
        if self.features[BestCheckpoint].best_checkpoint:
            given["best_every"] = self.save_every or SAVE_EVERY_UPDATES  # which weights are looked at
        if kind == "images" and self.trains_members_separately:  # what is trained by itself differs in its last digits
            given["jobs"] = "given"
        return given

    @property
    def trains_members_separately(self) -> bool:
        """Whether each member is trained by itself, as several processes need it."""
        return self.jobs is not None or self.member is not None

    def folder(self, seed: int) -> RunFolder:
        """Return the folder of a seed's run: what --run says, or where there are several seeds a folder in it."""
        return RunFolder(self.run if len(self.seeds) == 1 else self.run / f"seed-{seed}")

    def build_learner(self, kind: str, seed: int) -> Learner:
        """Make the learner of one seed. Raises ValueError that begins with the option that is wrong."""
        return build_learner(self.learner, kind, seed, self.wait, self.learner_options)

    def plan(self, learner: Learner, kind: str, num_megabatches: int) -> list[StagePlan]:
        """Plan all stages of one run. Raises ValueError that begins with the option that is wrong."""
        planned = self.stages(num_megabatches)
        if self.stage is not None and not 0 <= self.stage < len(planned):
            raise ValueError(f"--stage {self.stage}: the run has stages 0 to {len(planned) - 1}")
        plans = plan_stages(learner, planned)
        self._check_member(plans)
        return plans

    def chosen(self, plans: Sequence[StagePlan]) -> list[StagePlan]:
        """Return the plans of the stages that are run."""
        return [plan for plan in plans if self.stage in (None, plan.stage.index)]

    def stages(self, num_megabatches: int) -> list[Stage]:
        """Return the stages. Raises ValueError that begins with the option that leaves none."""
        if self.iid is not None:
            if self.iid > num_megabatches:
                raise ValueError(f"--iid {self.iid}: the stream has {num_megabatches} mega-batches; give at most that")
            return stages(num_megabatches, self.iid)[:1]
        planned = stages(num_megabatches, self.wait, self.replay, self.drop_rest, self.first_wait)
        if not planned:
            raise ValueError(
                f"--wait {self.wait} --drop-rest: the stream has {num_megabatches} mega-batches, so no stage is left; "
                "give a smaller --wait"
            )
        return planned

    def stages_of_length(self, num_megabatches: int) -> list[Stage]:
        """Return the stages with the mega-batches that ``--passes`` counts."""
        planned = self.stages(num_megabatches)
        return [replace(stage, megabatches=stage.arrivals) for stage in planned] if self.passes_of_new else planned

    def _check_member(self, plans: Sequence[StagePlan]) -> None:
        if self.member is None:
            return
        members = sorted({training.model.member for plan in self.chosen(plans) for training in plan.trainings})
        for member in self.member:
            if member not in members:
                where = "the run trains" if self.stage is None else f"stage {self.stage} trains"
                raise ValueError(f"--member {member}: {where} members {', '.join(map(str, members))}")


class Job(Protocol):
    """What differs between text and images; made of the request, the stream and the words after ``--``.

    Attributes:
        unit: of the data, ``token`` or ``image``.
        overridden: options after ``--`` that the preset sets and that were given with another value.
    """

    unit: str
    overridden: tuple[str, ...]

    def train_options(self) -> dict[str, str]:
        """Return the options after ``--`` for run.json."""

    def last(self, name: str) -> Optional[tuple[str, ...]]:
        """Return the values of the last occurrence of an option after ``--``; None: it is not given."""

    def print_plan(self, plans: Sequence[StagePlan], folder: RunFolder) -> None:
        """Print the commands of the stages that were asked for."""

    def predictor(self, folder: RunFolder, plan: StagePlan) -> tuple[Path, Sequence[Path]]:
        """Return the checkpoint that predicts after a stage, and those to make it of, if any."""

    def work(self) -> Callable[[StagePlan], float]:
        """Return a function that returns the length of a stage's training, in any unit."""

    def prepare(self, plans: Sequence[StagePlan]) -> Callable[[Sequence[Run]], Backend]:
        """Check that the options make a model, before anything is written; return what makes the back end of the runs.

        Raises:
            AlmaError: they make none.
        """
