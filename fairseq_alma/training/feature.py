"""Training features: callbacks with options of their own, one file each.

A feature has a plan side, in ``alma-stream`` before anything is trained (`PlannedRun`), and a training side: in
fairseq's commands the task (`training.stage_task`), in ``alma-stream`` on images a loop (`images.stage_training`). Only
features that an option switches on are called. The hooks of one update, in order::

    with feature.around_forward(model):    each forward pass, of training and of tests
        loss = …
    feature.before_step(optimizer, u)      gradients are clipped; u updates were made before
    optimizer.step()
    feature.after_step(model, u)           the weights have changed
    feature.count(logs)                    of the criterion

What a feature keeps between updates goes through `state_dict`, so that a killed training resumes with it. A dry run
imports neither torch nor fairseq. Source of the form: OLMo-core's callbacks with state.
"""

import argparse
import contextlib
from dataclasses import dataclass, field, replace
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

from fairseq_alma.options import TRAINING, Options, flag, options_of
from fairseq_alma.training.planned_run import PlannedRun

if TYPE_CHECKING:
    import numpy
    from torch import Tensor, nn


@dataclass(frozen=True)
class Setting:
    """The training, or test, that a feature is part of.

    Attributes:
        device: ``cpu`` or ``cuda``.
        optimizer: class of the optimizer, as checkpoints name it; None: the command does not train.
        start: checkpoint whose optimizer the training carries on (``--continue-once``); None: none.
        saving: fairseq's options of checkpoints, read at the end of an update; None: no such command.
        batches: how the training cuts its sequences into updates: batch_size, max_tokens, update_freq, num_procs.
    """

    device: str = "cpu"
    optimizer: Optional[str] = None
    start: Optional[str] = None
    saving: Any = None
    batches: Optional[Mapping[str, Any]] = None


@dataclass(frozen=True)
class Part:
    """A part of a stage's training.

    Attributes:
        first_update: updates that the optimizer has made before the stage.
        num_updates: of the whole stage; None: epochs end it.
        is_branch: whether it is a copy that is tested and thrown away.
    """

    first_update: int = 0
    num_updates: Optional[int] = None
    is_branch: bool = False


@dataclass
class Feature(Options):
    """A dataclass whose fields are options (see `options.opt`); a feature overrides the hooks that it needs.

    Attributes:
        owned: options of fairseq-train that alma-stream gives by itself -> how a user gives them instead.
        predicts_with: what of a stage is tested: ``average``, ``best`` or ``branch``; None: no change.
    """

    owned: ClassVar[Mapping[str, str]] = {}
    predicts_with: ClassVar[Optional[str]] = None

    @property
    def is_on(self) -> bool:
        """Whether one of its options differs from its default."""
        return any(getattr(self, name) != option.default for name, option in options_of(type(self)).items())

    def check(self, run: PlannedRun) -> None:
        """Raise ValueError, which begins with the option, if a run cannot have it."""

    def for_part(self: "Own", part: Part) -> "Own":
        """Return the feature as a part of a stage's training has it, without state."""
        return replace(self)

    def describe(self, part: Part) -> dict[str, Any]:
        """Return its entries of ``anytime`` in stage.json."""
        return {}

    def prepare(self, setting: Setting) -> None:
        """Raise AlmaError if the device or the command lacks what it needs; called before the model is built."""

    def begin(self, checkpoint: dict[str, Any], setting: Setting) -> None:
        """Change, in place, the checkpoint ``setting.start`` that a training carries on."""

    def around_forward(self, model: "nn.Module") -> ContextManager[Any]:
        """Return a context for a forward pass."""
        return contextlib.nullcontext()

    def before_step(self, optimizer: Any, update: int) -> None:
        """Act before the optimizer's step (fairseq's or torch's, both with ``param_groups``)."""

    def after_step(self, model: "nn.Module", update: int) -> None:
        """Act on the new weights."""

    def count(self, logs: Sequence[Mapping[str, Any]]) -> None:
        """Take the criterion's logs of an update, one for each batch of each process."""

    def draw_earlier(self, sizes: Sequence[Sequence[int]], seed: int) -> "Optional[numpy.ndarray]":
        """Return indices of earlier sequences or images that a stage trains on too, None for none.

        Args:
            sizes: sequences or images of each mega-batch, for each stage so far, the current one last.
            seed: of the draw.
        """
        return None

    def to_test(self, model: "nn.Module") -> "Optional[Mapping[str, Tensor]]":
        """Return what is tested instead of some weights, by name; None: no change. Called for images alone."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, under keys that no other feature has."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of all features of a training; keys may be missing."""


FEATURES: list[type[Feature]] = []
"""All features, in the order in which their hooks are called."""
Kind = TypeVar("Kind", bound=type[Feature])
Own = TypeVar("Own", bound=Feature)


def register_feature(kind: Kind) -> Kind:
    """Register a feature. Raises ValueError if another one has one of its options."""
    for other in FEATURES:
        if shared := options_of(kind).keys() & options_of(other).keys():
            raise ValueError(f"feature {kind.__name__}: {other.__name__} has the option {min(shared)} already")
    FEATURES.append(kind)
    return kind


@dataclass
class Features:
    """The features of a training, in the order in which they are called."""

    each: Sequence[Feature] = ()
    setting: Setting = field(default_factory=Setting)

    @classmethod
    def of(cls, values: Mapping[str, Any], setting: Setting) -> "Features":
        """Return those that a fairseq configuration switches on."""
        return cls([each for kind in FEATURES if (each := kind(**_given(kind, values))).is_on], setting)

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> "Features":
        """Return those that the options of alma-stream switch on."""
        return cls([each for kind in FEATURES if (each := kind.read(arguments)).is_on])

    def __getitem__(self, kind: type[Own]) -> Own:
        """Return the feature of a class, with its defaults where it is off."""
        return next((each for each in self.each if isinstance(each, kind)), None) or kind()

    def with_options(self, values: Mapping[str, Any]) -> "Features":
        """Return them with further values of options, by field names."""
        given = {kind: {name: values[name] for name in options_of(kind) if name in values} for kind in FEATURES}
        each = [replace(self[kind], **own) for kind, own in given.items()]
        return Features([feature for feature in each if feature.is_on], self.setting)

    @property
    def predicts_with(self) -> str:
        """What of a stage is tested: its ``last`` weights unless a feature changes that."""
        return next((each.predicts_with for each in self.each if each.predicts_with is not None), "last")

    def check(self, run: PlannedRun) -> None:
        """Raise ValueError, which begins with an option, if features contradict each other or the run."""
        given = [each.record().items() for each in self.each if each.predicts_with is not None]
        if len(given) > 1:
            tested = [
                " ".join(flag(name) + (value is not True) * f" {value}" for name, value in each) for each in given
            ]
            raise ValueError(f"{tested[0]}: {tested[1]} also decides which model is tested; give one of them")
        for each in self.each:
            each.check(run)

    def record(self, kind: Optional[str] = None) -> dict[str, Any]:
        """Return the options that were given, for run.json."""
        return {name: value for each in self.each for name, value in each.record(kind).items()}

    def words(self, part: Part) -> list[tuple[str, ...]]:
        """Return the options of fairseq-train for a part of a stage, grouped by feature."""
        groups = [tuple(each.for_part(part).words()) for each in self.each]
        return [group for group in groups if group]

    def for_part(self, part: Part) -> "Features":
        """Return them as a part of a stage's training has them, without state."""
        return Features([each.for_part(part) for each in self.each], self.setting)

    def describe(self, part: Part) -> dict[str, Any]:
        """Return the ``anytime`` entry of stage.json; empty if no option was given."""
        if not self.record():
            return {}
        own = {name: value for each in self.each for name, value in each.describe(part).items()}
        return {"predicts_with": self.predicts_with, **own}

    @contextlib.contextmanager
    def around_forward(self, model: "nn.Module") -> Iterator[None]:
        with contextlib.ExitStack() as contexts:
            for each in self.each:
                contexts.enter_context(each.around_forward(model))
            yield

    def around(self, function: Callable[..., Any], model: "nn.Module") -> Callable[..., Any]:
        """Return a function whose forward passes are made within `around_forward`.

        For the criterion, not for a step of fairseq's, which switches autocast off for what it calls.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.around_forward(model):
                return function(*args, **kwargs)

        return call if self._overrides("around_forward") else function

    @property
    def draws_earlier(self) -> bool:
        """Whether one of them may draw from earlier stages."""
        return self._overrides("draw_earlier")

    def draw_earlier(self, sizes: Sequence[Sequence[int]], seed: int) -> "Optional[numpy.ndarray]":
        """Call `Feature.draw_earlier`; the first that draws decides."""
        drawn = (each.draw_earlier(sizes, seed) for each in self.each)
        return next((indices for indices in drawn if indices is not None), None)

    def to_test(self, model: "nn.Module") -> "Optional[Mapping[str, Tensor]]":
        """Call `Feature.to_test`; the first that returns anything decides."""
        return next((own for each in self.each if (own := each.to_test(model)) is not None), None)

    def state_dict(self) -> dict[str, Any]:
        return {key: value for each in self.each for key, value in each.state_dict().items()}

    def prepare(self) -> None:
        for each in self.each:
            each.prepare(self.setting)

    def begin(self, checkpoint: dict[str, Any]) -> None:
        for each in self.each:
            each.begin(checkpoint, self.setting)

    def before_step(self, optimizer: Any, update: int) -> None:
        for each in self.each:
            each.before_step(optimizer, update)

    def after_step(self, model: "nn.Module", update: int) -> None:
        for each in self.each:
            each.after_step(model, update)

    def count(self, logs: Sequence[Mapping[str, Any]]) -> None:
        for each in self.each:
            each.count(logs)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for each in self.each:
            each.load_state_dict(state)

    def _overrides(self, hook: str) -> bool:
        return any(getattr(type(each), hook) is not getattr(Feature, hook) for each in self.each)


def _given(kind: type[Feature], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a feature's options that differ from fairseq's default."""
    found = {}
    for name, option in options_of(kind).items():
        value = values.get(name)
        value = getattr(value, "value", value)  # of an enumeration, where fairseq has made one of the choices
        if value is not None and value != option.default_on(TRAINING):
            found[name] = value
    return found
