"""Training features: callbacks with options, one file each.

Before training, ``alma-stream`` checks each feature on a `PlannedRun`. During training, fairseq's task
(`training.stage_task`) or ``alma-stream`` on images (`images.stage_training`) calls the hooks of the features whose
options the user gave. The hooks of one update are, in order::

    with feature.around_forward(model):    each forward pass, in training and evaluation
        loss = …
    feature.before_step(optimizer, u)      gradients are clipped; u is the number of earlier updates
    optimizer.step()
    feature.after_step(model, u)           the weights have changed
    feature.count(logs)                    log outputs of the criterion

`state_dict` saves the state of a feature in checkpoints, so that a resumed training restores the state. A dry run
imports neither torch nor fairseq. The design follows the stateful callbacks of OLMo-core.
"""

import argparse
import contextlib
from dataclasses import dataclass, field, replace
from functools import partialmethod
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

from fairseq_alma.learners.learner import StagePlan
from fairseq_alma.options import TRAINING, Options, flag, options_of

if TYPE_CHECKING:
    import numpy
    from torch import Tensor, nn

ENDLESS = ("fixed", "inverse_sqrt")
"""Learning-rate schedules that do not depend on the last update; ``fixed`` is constant after a warm-up."""


@dataclass(frozen=True)
class PlannedRun:
    """A run of alma-stream before training. Checks raise ValueError with a message that begins with an option."""

    kind: str  # ``text`` or ``images``
    plans: Sequence[StagePlan]  # plans of all stages
    replay: bool  # whether each stage trains on all mega-batches up to its own
    # function that returns the values of an option after ``--`` (last occurrence), or None if the option is not given
    last: Callable[[str], Optional[tuple[str, ...]]]
    features: "Features"  # all features of the run

    @property
    def schedule(self) -> str:
        """Return the name of the learning-rate schedule."""
        return " ".join(self.last("--lr-scheduler") or ("fixed",))

    def number(self, name: str) -> Optional[float]:
        """Return the value of a numeric option after ``--``, or None if the option is not given."""
        values = self.last(name)
        return None if values is None else float(" ".join(values))

    def require_updates(self, flag: str) -> None:
        """Check that each stage has a fixed length: ``--max-update`` for text, no ``--patience`` for images."""
        if self.kind == "images" and self.last("--patience") is not None:
            raise ValueError(f"{flag}: needs a fixed number of updates per stage; omit --patience, which ends it early")
        if self.kind == "text" and (self.last("--max-update") is None or self.last("--max-epoch") is not None):
            raise ValueError(f"{flag}: needs a number of updates per stage; give --max-update after --, no --max-epoch")

    def require_endless(self, flag: str) -> None:
        """Check that the learning rate does not decay to zero and does not depend on the epoch."""
        if self.schedule not in ENDLESS:
            raise ValueError(f"{flag}: --lr-scheduler {self.schedule} decays itself; give {' or '.join(ENDLESS)}")
        rates = " ".join(self.last("--lr") or ())
        if "," in rates or self.last("--force-anneal") is not None:
            given = f"--lr {rates}" if "," in rates else "--force-anneal"
            raise ValueError(f"{flag}: {given} depends on the epoch, which restarts in each stage; give a single --lr")


@dataclass(frozen=True)
class Setting:
    """Properties of the command in which a feature runs."""

    device: str = "cpu"  # ``cpu`` or ``cuda``
    optimizer: Optional[str] = None  # class name of the optimizer, as in checkpoints; None: the command does not train
    start: Optional[str] = None  # checkpoint of ``--continue-once``; None: the option is not given
    saving: Any = None  # fairseq's checkpoint options, read at the end of each update; None: the command has none
    # batch_size, max_tokens, update_freq and num_procs of the training; None: the command does not train
    batches: Optional[Mapping[str, Any]] = None


@dataclass(frozen=True)
class Part:
    """A contiguous part of the updates of a stage, of the main training or of its branch."""

    first_update: int = 0  # number of updates of the optimizer before the stage
    num_updates: Optional[int] = None  # number of updates in the stage; None: the stage ends after its epochs
    is_branch: bool = False  # whether a branch (copy of the model whose learning rate decays) is trained


@dataclass
class Feature(Options):
    """Base class of training features. Fields are options (see `options.opt`); a subclass overrides hooks."""

    # options of fairseq-train that alma-stream sets for the feature, each with the advice to a user who gives it
    owned: ClassVar[Mapping[str, str]] = {}
    # checkpoint to evaluate: ``average``, ``best`` or ``branch``; None: the last checkpoint
    predicts_with: ClassVar[Optional[str]] = None

    @property
    def is_on(self) -> bool:
        """Return whether an option differs from its default."""
        return any(getattr(self, name) != option.default for name, option in options_of(type(self)).items())

    def check(self, run: PlannedRun) -> None:
        """Raise ValueError, beginning with an option, if the feature does not fit a run."""

    def for_part(self: "Own", part: Part) -> "Own":
        """Return a new feature without state for a `Part` of a stage."""
        return replace(self)

    def describe(self, part: Part) -> dict[str, Any]:
        """Return the entries of the feature in ``anytime`` of stage.json."""
        return {}

    def prepare(self, setting: Setting) -> None:
        """Raise AlmaError if the feature does not fit the command; called before the model is built."""

    def begin(self, checkpoint: dict[str, Any], setting: Setting) -> None:
        """Change the checkpoint ``setting.start`` in place."""

    def around_forward(self, model: "nn.Module") -> ContextManager[Any]:
        """Return a context manager for a forward pass."""
        return contextlib.nullcontext()

    def before_step(self, optimizer: Any, update: int) -> None:
        """Run before each step of fairseq's or torch's optimizer; both have ``param_groups``."""

    def after_step(self, model: "nn.Module", update: int) -> None:
        """Run after each step of the optimizer."""

    def count(self, logs: Sequence[Mapping[str, Any]]) -> None:
        """Process the log outputs of the criterion for an update, one per batch and process."""

    def draw_earlier(self, sizes: Sequence[Sequence[int]], seed: int) -> "Optional[numpy.ndarray]":
        """Return indices of training sequences sampled from earlier stages of text; None: no earlier sequences.

        Args:
            sizes: for each stage up to the current one, the number of sequences in each mega-batch.
            seed: random seed.
        """
        return None

    def to_test(self, model: "nn.Module") -> "Optional[Mapping[str, Tensor]]":
        """Return weights to evaluate in place of the model weights, by name; None: no change. Images only."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints; keys must be unique among all features."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the feature from the merged state of all features; keys may be missing."""


FEATURES: list[type[Feature]] = []
"""All features, in the order of their hooks."""
Kind = TypeVar("Kind", bound=type[Feature])
Own = TypeVar("Own", bound=Feature)


def register_feature(kind: Kind) -> Kind:
    """Register a feature. Raises ValueError if another feature has an option of the same name."""
    for other in FEATURES:
        if shared := options_of(kind).keys() & options_of(other).keys():
            raise ValueError(f"feature {kind.__name__}: option {min(shared)} exists in {other.__name__}; rename it")
    FEATURES.append(kind)
    return kind


@dataclass
class Features:
    """The features of a training, in the order of their hooks."""

    each: Sequence[Feature] = ()
    setting: Setting = field(default_factory=Setting)

    @classmethod
    def of(cls, values: Mapping[str, Any], setting: Setting) -> "Features":
        """Return the features that have a non-default option in a fairseq configuration."""
        each = []
        for kind in FEATURES:
            given = {}
            for name, option in options_of(kind).items():
                value = getattr(values.get(name), "value", values.get(name))  # fairseq's choices are enumerations
                if value is not None and value != option.default_on(TRAINING):
                    given[name] = value
            each.append(kind(**given))
        return cls([feature for feature in each if feature.is_on], setting)

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> "Features":
        """Return the features that have an option in the parsed arguments of alma-stream."""
        return cls([each for kind in FEATURES if (each := kind.read(arguments)).is_on])

    def __getitem__(self, kind: type[Own]) -> Own:
        """Return the feature of a class, or a new feature with default options if the class is not active."""
        return next((each for each in self.each if isinstance(each, kind)), None) or kind()

    def with_options(self, values: Mapping[str, Any]) -> "Features":
        """Return the features with additional option values, by field name."""
        given = {kind: {name: values[name] for name in options_of(kind) if name in values} for kind in FEATURES}
        changed = [replace(self[kind], **own) for kind, own in given.items()]
        return Features([feature for feature in changed if feature.is_on], self.setting)

    @property
    def predicts_with(self) -> str:
        """Return the checkpoint to evaluate: the choice of a feature, else ``last``."""
        return next((each.predicts_with for each in self.each if each.predicts_with is not None), "last")

    def check(self, run: PlannedRun) -> None:
        """Raise ValueError, beginning with an option, if two features conflict or a feature does not fit the run."""
        testing = [each.record().items() for each in self.each if each.predicts_with is not None]
        if len(testing) > 1:
            given = [
                " ".join(flag(name) + (value is not True) * f" {value}" for name, value in each) for each in testing
            ]
            raise ValueError(f"{given[0]}: {given[1]} also selects the model to test; give one of them")
        for each in self.each:
            each.check(run)

    def record(self, kind: Optional[str] = None) -> dict[str, Any]:
        """Return the given options, for run.json."""
        return {name: value for each in self.each for name, value in each.record(kind).items()}

    def words(self, part: Part) -> list[tuple[str, ...]]:
        """Return the options of fairseq-train for a `Part` of a stage, one group of words per feature."""
        return [words for each in self.each if (words := tuple(each.for_part(part).words()))]

    def for_part(self, part: Part) -> "Features":
        """Return new features without state for a `Part` of a stage."""
        return Features([each.for_part(part) for each in self.each], self.setting)

    def describe(self, part: Part) -> dict[str, Any]:
        """Return the ``anytime`` entry of stage.json; empty if no option is given."""
        own = {name: value for each in self.each for name, value in each.describe(part).items()}
        return {"predicts_with": self.predicts_with, **own} if self.record() else {}

    @contextlib.contextmanager
    def around_forward(self, model: "nn.Module") -> Iterator[None]:
        with contextlib.ExitStack() as contexts:
            for each in self.each:
                contexts.enter_context(each.around_forward(model))
            yield

    def around(self, function: Callable[..., Any], model: "nn.Module") -> Callable[..., Any]:
        """Return ``function``, wrapped in the `around_forward` contexts of all features.

        The wrapped function is the criterion, because fairseq's training step disables autocast around the criterion.
        """
        return self.around_forward(model)(function)

    @property
    def draws_earlier(self) -> bool:
        """Return whether any feature can sample training sequences of earlier stages."""
        return any(type(each).draw_earlier is not Feature.draw_earlier for each in self.each)

    def draw_earlier(self, sizes: Sequence[Sequence[int]], seed: int) -> "Optional[numpy.ndarray]":
        """Return the first result of `Feature.draw_earlier` that is not None, else None."""
        drawn = (each.draw_earlier(sizes, seed) for each in self.each)
        return next((indices for indices in drawn if indices is not None), None)

    def to_test(self, model: "nn.Module") -> "Optional[Mapping[str, Tensor]]":
        """Return the first result of `Feature.to_test` that is not None, else None."""
        return next((own for each in self.each if (own := each.to_test(model)) is not None), None)

    def state_dict(self) -> dict[str, Any]:
        return {key: value for each in self.each for key, value in each.state_dict().items()}

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of each feature."""
        for each in self.each:
            getattr(each, hook)(*args)

    before_step, after_step = partialmethod(call, "before_step"), partialmethod(call, "after_step")
    count, load_state_dict = partialmethod(call, "count"), partialmethod(call, "load_state_dict")

    def prepare(self) -> None:
        self.call("prepare", self.setting)

    def begin(self, checkpoint: dict[str, Any]) -> None:
        self.call("begin", checkpoint, self.setting)
