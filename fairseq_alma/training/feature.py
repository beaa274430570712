"""What a training does beside learning: a feature is a callback with options of its own, in a file of its own.

A feature has a plan side, in ``alma-stream`` before anything is trained (`PlannedRun`), and a training side, where the
model is: in fairseq's commands the task (`training.stage_task`), and in ``alma-stream`` on images a loop
(`images.stage_training`). Both call the same hooks, and only those of features that an option switches on. Of one
update, in this order::

    with feature.around_forward(model):    each forward pass, of training and of tests
        loss = …
    feature.before_step(optimizer, u)      gradients are there, and clipped; u updates were made before
    optimizer.step()
    feature.after_step(model, u)           the weights have changed
    feature.count(logs)                    of the criterion

What a feature keeps between updates it hands over by `state_dict`, so that a killed training resumes with it. A feature
from elsewhere (``alma-stream --features-from``) is ``docs/how-to/own-learner.md``'s last example.

Neither torch nor fairseq at the top of a file that ``alma-stream`` reads options from: a dry run imports neither.
Source of the form: callbacks of OLMo-core, which have a state of their own.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ClassVar,
    ContextManager,
    Iterator,
    Mapping,
    Optional,
    Sequence,
    TypeVar,
)

from fairseq_alma.errors import GIVEN_CODE, AlmaError, in_one_line
from fairseq_alma.learners.learner import StagePlan
from fairseq_alma.options import TRAINING, Options, options_of

ENDLESS = ("fixed", "inverse_sqrt")
"""Schedules without a horizon; fairseq's ``fixed`` is a warm-up, then constant."""


@dataclass(frozen=True)
class PlannedRun:
    """What a feature may ask of a run; what is wrong raises ValueError, which begins with the feature's option.

    Attributes:
        kind: of data.
        plans: of all stages.
        replay: whether each stage trains on all mega-batches so far.
        last: returns the values of an option after ``--``, of its last occurrence; None: it is not given.
        features: all that the run has.
    """

    kind: str
    plans: Sequence[StagePlan]
    replay: bool
    last: Callable[[str], Optional[tuple[str, ...]]]
    features: "Features"

    @property
    def max_update(self) -> Optional[int]:
        """Updates of a stage."""
        number = self.number("--max-update")
        return None if number is None else int(number)

    @property
    def schedule(self) -> str:
        """Name of the learning-rate schedule."""
        return " ".join(self.last("--lr-scheduler") or ("fixed",))

    def number(self, name: str) -> Optional[float]:
        """Return the value of an option that is a number."""
        values = self.last(name)
        return None if values is None else float(" ".join(values))

    def require_updates(self, flag: str) -> None:
        """Refuse stages of text that epochs end, and of images that end early."""
        if self.kind == "images" and self.last("--patience") is not None:
            raise ValueError(
                f"{flag}: counts the updates of a stage, which --patience after the -- may end early; leave --patience "
                "out"
            )
        if self.kind == "text" and (self.max_update is None or self.last("--max-epoch") is not None):
            raise ValueError(
                f"{flag}: counts the updates of a stage; give --max-update after the --, and no --max-epoch"
            )

    def require_endless(self, flag: str) -> None:
        """Refuse schedules that decay by themselves, and rates that depend on the epoch."""
        if self.schedule not in ENDLESS:
            raise ValueError(
                f"{flag}: --lr-scheduler {self.schedule} after the -- decays by itself; give {' or '.join(ENDLESS)} "
                "instead"
            )
        self.refuse_rates_by_epoch(flag)

    def refuse_rates_by_epoch(self, flag: str) -> None:
        """Refuse what begins anew in each stage."""
        rates = " ".join(self.last("--lr") or ())
        if "," in rates or self.last("--force-anneal") is not None:
            given = f"--lr {rates}" if "," in rates else "--force-anneal"
            raise ValueError(
                f"{flag}: {given} after the -- depends on the epoch, which begins anew in each stage; give one --lr"
            )


if TYPE_CHECKING:
    import numpy
    from torch import Tensor, nn


@dataclass(frozen=True)
class Setting:
    """What a feature may know of the training, or test, that it is part of.

    Attributes:
        device: ``cpu`` or ``cuda``.
        optimizer: class of the optimizer, as checkpoints name it; None: the command does not train.
        start: checkpoint that the training begins with, optimizer and all (``--continue-once``); None: none.
        needs_whole_weights: what needs all weights of the model in one process; None: nothing does.
        autocast: precision of products, as torch names it; None: that of the weights.
        saving: fairseq's options of checkpoints, which count as they are when an update is over; None: no such command.
        draw_weights: returns initial weights by their names, as a model would have them that starts from nothing; of a
            stage on images that starts from another.
    """

    device: str = "cpu"
    optimizer: Optional[str] = None
    start: Optional[str] = None
    needs_whole_weights: Optional[str] = None
    autocast: Optional[str] = None
    saving: Any = None
    draw_weights: "Optional[Callable[[], Mapping[str, Tensor]]]" = None


@dataclass(frozen=True)
class Part:
    """A part of a stage's training.

    Attributes:
        first_update: updates that the optimizer has made before the stage.
        num_updates: of the whole stage; None: epochs end it.
        is_branch: whether it is a copy that branches off, to be tested and thrown away.
        stage: number of the stage.
    """

    first_update: int = 0
    num_updates: Optional[int] = None
    is_branch: bool = False
    stage: int = 0


@dataclass
class Feature(Options):
    """A dataclass whose fields are options (see `options.opt`); no hook does anything unless a feature says so.

    Attributes:
        needs_whole_weights: the name of what needs all weights of the model in one process; None: nothing.
        computes_in: the precision that it lets products have, as torch names it; None: it leaves that alone.
        owned: options of fairseq-train that alma-stream gives by itself -> how a user says it instead.
    """

    needs_whole_weights: ClassVar[Optional[str]] = None
    computes_in: ClassVar[Optional[str]] = None
    owned: ClassVar[Mapping[str, str]] = {}

    @property
    def is_on(self) -> bool:
        """Whether the training has it: one of its options is not at its default."""
        return any(getattr(self, name) != option.default for name, option in options_of(type(self)).items())

    @property
    def predicts_with(self) -> Optional[str]:
        """What of a stage is tested: ``average``, ``best``, ``branch``; None: the feature leaves that alone."""
        return None

    @property
    def way(self) -> Optional[str]:
        """The option, as given, that decides what is tested, which two cannot; None: it leaves that alone."""
        return None

    def check(self, run: PlannedRun) -> None:
        """Raise ValueError, which begins with the option, if a run cannot have it."""

    def for_part(self: "Own", part: Part) -> "Own":
        """Return the feature as a part of a stage's training has it, with no state yet."""
        return replace(self)

    def describe(self, part: Part) -> dict[str, Any]:
        """Return what stage.json says of it under ``anytime``."""
        return {}

    def prepare(self, setting: Setting) -> None:
        """Raise AlmaError if the device cannot do it, or another option is missing; before the model is built."""

    def begin(self, checkpoint: dict[str, Any], setting: Setting) -> None:
        """Change what a training begins with that carries another one on, in place.

        Args:
            checkpoint: of ``Setting.start``; of images its ``model``, and where averages are tested ``average``, which
                has what was tested of the stage before under the same names.
            setting: of the training.
        """

    def wrap(self, model: "nn.Module", setting: Setting) -> "nn.Module":
        """Return the model as it is to be trained."""
        return model

    def around_forward(self, model: "nn.Module") -> ContextManager[Any]:
        """Return a context for a forward pass."""
        return contextlib.nullcontext()

    def before_step(self, optimizer: Any, update: int) -> None:
        """Act once gradients are there, before the optimizer's step.

        Args:
            optimizer: fairseq's, or torch's; both have ``param_groups``.
            update: updates that were made before.
        """

    def after_step(self, model: "nn.Module", update: int) -> None:
        """Act on the weights that the optimizer's step has made; as `before_step`."""

    def count(self, logs: Sequence[Mapping[str, Any]]) -> None:
        """Take notice of what the criterion logged of an update, one entry for each batch of each process."""

    def draw_earlier(self, sizes: Sequence[Sequence[int]], seed: int) -> "Optional[numpy.ndarray]":
        """Draw what a stage trains on beside its own mega-batches; None: nothing.

        Args:
            sizes: of each stage so far, the one at hand last, the sequences or images of each of its mega-batches.
            seed: what the draw depends on.

        Returns:
            Numbers of sequences or images of the stages before, counted through all of them.
        """
        return None

    def to_test(self, model: "nn.Module") -> "Optional[Mapping[str, Tensor]]":
        """Return what is tested instead of some weights, by their names; None: the feature leaves that alone.

        For images, after each epoch that is the best so far; of text `state_dict` keeps it for alma-ensemble --average.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, under keys that no other feature has."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what an interrupted training, or the stage before, had; it may lack what this one did not keep."""


FEATURES: list[type[Feature]] = []
"""All features, in the order in which their hooks are called."""
Kind = TypeVar("Kind", bound=type[Feature])
Own = TypeVar("Own", bound=Feature)


def register_feature(kind: Kind) -> Kind:
    """Let trainings have a feature, a dataclass, and commands its options.

    Raises:
        ValueError: one of its options belongs to another feature.
    """
    for other in FEATURES:
        if shared := options_of(kind).keys() & options_of(other).keys():
            raise ValueError(f"feature {kind.__name__}: {other.__name__} has the option {min(shared)} already")
    FEATURES.append(kind)
    return kind


def import_from(path: Path) -> None:
    """Import a file, or a folder, of Python that registers features or learners; it may import what stands beside it.

    By its path, as a name may be taken, such as ``queue``, or be none that Python can import, such as ``a.b.py``.

    Raises:
        AlmaError: it is no such file or folder, or fails; says in which line.
    """
    here = path.resolve()
    file = here / "__init__.py" if here.is_dir() else here
    if not file.is_file() or file.suffix != ".py":
        raise AlmaError(f"{path}: no Python found; give a file X.py, or a folder with __init__.py in it")
    name = here.stem if here.stem.isidentifier() else "_given"
    if getattr(sys.modules.get(name), "__file__", None) == str(file):
        return
    found = sys.modules.get(name) or importlib.util.find_spec(name)
    if found is not None and getattr(found, "origin", None) != str(file):
        name = f"_given_{hashlib.sha256(os.fsencode(file)).hexdigest()}"
    if name in sys.modules:
        return
    GIVEN_CODE.append(str(here))
    sys.path.append(str(here.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # of any .py file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with in_one_line():
        spec.loader.exec_module(module)


@dataclass
class Features:
    """Those features that a training has, to be called as if they were one.

    Attributes:
        each: in the order in which they are called.
        setting: of the training.
    """

    each: Sequence[Feature] = ()
    setting: Setting = field(default_factory=Setting)

    @classmethod
    def of(cls, values: Mapping[str, Any], setting: Setting) -> "Features":
        """Make those that a configuration switches on.

        Args:
            values: of options, by the names of their fields, as fairseq's configuration has them.
            setting: of the training.
        """
        active = [each for kind in FEATURES if (each := kind(**_given(kind, values))).is_on]
        whole = next((each.needs_whole_weights for each in active if each.needs_whole_weights is not None), None)
        short = next((each.computes_in for each in active if each.computes_in is not None), None)
        return cls(active, replace(setting, needs_whole_weights=whole, autocast=short))

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> "Features":
        """Make those that the options of alma-stream switch on."""
        return cls([each for kind in FEATURES if (each := kind.read(arguments)).is_on])

    def __getitem__(self, kind: type[Own]) -> Own:
        """Return the feature of a class; with its defaults where it is not switched on."""
        return next((each for each in self.each if isinstance(each, kind)), None) or kind()

    @property
    def predicts_with(self) -> str:
        """What is tested of a stage: its ``last`` weights unless a feature says otherwise."""
        return next((each.predicts_with for each in self.each if each.predicts_with is not None), "last")

    @property
    def ways(self) -> list[str]:
        """The options, as given, that decide what is tested."""
        return [each.way for each in self.each if each.way is not None]

    def with_options(self, values: Mapping[str, Any]) -> "Features":
        """Return them with what options of trainings say beside, by the names of their fields."""
        given = {kind: {name: values[name] for name in options_of(kind) if name in values} for kind in FEATURES}
        each = [replace(self[kind], **own) for kind, own in given.items()]
        return Features([feature for feature in each if feature.is_on], self.setting)

    def check(self, run: PlannedRun) -> None:
        """Raise ValueError, which begins with an option, if features contradict each other or the run."""
        if len(self.ways) > 1:
            raise ValueError(
                f"{self.ways[0]}: {self.ways[1]} is another way to the model that is tested; give one of them"
            )
        for each in self.each:
            each.check(run)

    def record(self, kind: Optional[str] = None) -> dict[str, Any]:
        """Return what run.json says: what was given, so that a run without features has the record it always had."""
        return {name: value for each in self.each for name, value in each.record(kind).items()}

    def words(self, part: Part) -> list[tuple[str, ...]]:
        """Return the options of fairseq-train for a part of a stage, those of a feature together."""
        groups = [tuple(each.for_part(part).words()) for each in reversed(self.each)]  # as these were always printed
        return [group for group in groups if group]

    def for_part(self, part: Part) -> "Features":
        """Return them as a part of a stage's training has them, with no state yet."""
        return Features([each.for_part(part) for each in self.each], self.setting)

    def describe(self, part: Part) -> dict[str, Any]:
        """Return what stage.json says of all of them under ``anytime``; nothing where none was asked for."""
        if not self.record():
            return {}
        own = {name: value for each in self.each for name, value in each.describe(part).items()}
        return {"predicts_with": self.predicts_with, **own}

    def prepare(self) -> None:
        for each in self.each:
            each.prepare(self.setting)

    def begin(self, checkpoint: dict[str, Any]) -> None:
        for each in self.each:
            each.begin(checkpoint, self.setting)

    def wrap(self, model: "nn.Module") -> "nn.Module":
        for each in self.each:
            model = each.wrap(model, self.setting)
        return model

    @contextlib.contextmanager
    def around_forward(self, model: "nn.Module") -> Iterator[None]:
        with contextlib.ExitStack() as contexts:
            for each in self.each:
                contexts.enter_context(each.around_forward(model))
            yield

    def around(self, function: Callable[..., Any], model: "nn.Module") -> Callable[..., Any]:
        """Return a function that makes forward passes as one that does so within `around_forward`.

        Around the criterion alone, not around a step of fairseq's, which switches autocast off for what it calls; and
        gradients take the precision of their forward pass by themselves.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.around_forward(model):
                return function(*args, **kwargs)

        return call if self._overrides("around_forward") else function

    def before_step(self, optimizer: Any, update: int) -> None:
        for each in self.each:
            each.before_step(optimizer, update)

    def after_step(self, model: "nn.Module", update: int) -> None:
        for each in self.each:
            each.after_step(model, update)

    def count(self, logs: Sequence[Mapping[str, Any]]) -> None:
        for each in self.each:
            each.count(logs)

    @property
    def draws_earlier(self) -> bool:
        """Whether one of them may draw from earlier stages."""
        return self._overrides("draw_earlier")

    def draw_earlier(self, sizes: Sequence[Sequence[int]], seed: int) -> "Optional[numpy.ndarray]":
        """Call `Feature.draw_earlier`; the first that draws anything decides."""
        drawn = (each.draw_earlier(sizes, seed) for each in self.each)
        return next((indices for indices in drawn if indices is not None), None)

    def to_test(self, model: "nn.Module") -> "Optional[Mapping[str, Tensor]]":
        """Call `Feature.to_test`; the first that returns anything decides."""
        return next((own for each in self.each if (own := each.to_test(model)) is not None), None)

    def state_dict(self) -> dict[str, Any]:
        """Return what all of them keep."""
        return {key: value for each in self.each for key, value in each.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for each in self.each:
            each.load_state_dict(state)

    def _overrides(self, hook: str) -> bool:
        return any(getattr(type(each), hook) is not getattr(Feature, hook) for each in self.each)


def _given(kind: type[Feature], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a feature's options, None for what is at fairseq's default."""
    found = {}
    for name, option in options_of(kind).items():
        value = values.get(name)
        value = getattr(value, "value", value)  # of an enumeration, where fairseq has made one of the choices
        if value is not None and value != option.default_on(TRAINING):
            found[name] = value
    return found
