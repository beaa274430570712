"""Training features: base class (callbacks with options), `TokenCount`, and import of user-defined code.

Before training, ``alma-stream`` passes a `PlannedRun` to `Feature.check`. During training, fairseq's task
(`training.stage_task`) or ``alma-stream`` on images (`images.stage_trainer`) calls the hooks of the active features
(`Feature.is_on`). The hooks of one update are, in order::

    with feature.around_forward(model):    each forward pass, in training and evaluation
        loss = …
    feature.before_step(optimizer, u)      gradients are clipped; u is the number of earlier updates
    optimizer.step()
    feature.after_step(model, u)           the weights have changed
    feature.count(logs)                    log outputs of the criterion

Checkpoints contain the result of `state_dict`, and a resumed run restores the state of each feature. This module
imports neither torch nor fairseq, so that a dry run is fast. The design follows the stateful callbacks of OLMo-core.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import os
import sys
from dataclasses import dataclass, field, replace
from functools import partialmethod
from pathlib import Path
from types import ModuleType
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

from fairseq_alma.checkpoints import FIRST_UPDATE, TRAIN_TOKENS
from fairseq_alma.errors import USER_CODE, AlmaError, in_one_line
from fairseq_alma.learners.learner import StagePlan
from fairseq_alma.options import TRAINING, Options, flag, options_of

if TYPE_CHECKING:
    from torch import Tensor, nn

# Key in the state of training features. The value is a list of dictionaries, for the first batch size and for each
# change, with the keys from_update, batch_size, max_tokens, update_freq and num_procs.
BATCHES = "batches"
ENDLESS = ("fixed", "inverse_sqrt")  # learning-rate schedules that do not depend on the training length


@dataclass(frozen=True)
class PlannedRun:
    """Plan of a run of alma-stream. Error messages of the ``require_…`` methods begin with the argument ``flag``."""

    kind: str  # ``text`` or ``images``
    plans: Sequence[StagePlan]  # plans of all stages
    replay: bool  # whether each stage trains on the mega-batches of all stages so far
    # function: option -> values of the last occurrence of the option after ``--``; None if the option is not given
    last: Callable[[str], Optional[tuple[str, ...]]]

    def value(self, name: str) -> str:
        """Return the value of a fairseq-train option (after ``--``), or an empty string if the option is not given."""
        return " ".join(self.last(name) or ())

    def require_updates(self, flag: str) -> None:
        """Raise ValueError unless each stage has a fixed number of updates; the message begins with ``flag``."""
        if self.kind == "images" and self.last("--patience") is not None:
            raise ValueError(f"{flag}: needs a fixed number of updates per stage; omit --patience (early stopping)")
        if self.kind == "text" and (self.last("--max-update") is None or self.last("--max-epoch") is not None):
            raise ValueError(f"{flag}: needs a fixed number of updates per stage; give --max-update, not --max-epoch")

    def require_endless(self, flag: str, alternative: str = "") -> None:
        """Raise ValueError if the learning rate depends on the training length or on the epoch number.

        If the schedule is not supported, the message ends with ``alternative``, which names other supported schedules.
        """
        if (schedule := self.value("--lr-scheduler") or "fixed") not in ENDLESS:
            raise ValueError(
                f"{flag}: --lr-scheduler {schedule} is not supported; give {' or '.join(ENDLESS)}{alternative}"
            )
        reason = "depends on the epoch number, which restarts in each stage"
        if "," in (rates := self.value("--lr")):
            raise ValueError(f"{flag}: --lr {rates} {reason}; give a single --lr")
        if self.last("--force-anneal") is not None:
            raise ValueError(f"{flag}: --force-anneal {reason}; omit --force-anneal")


@dataclass(frozen=True)
class Setting:
    """Device, optimizer, starting checkpoint and batch options of the command that runs the features."""

    device: str = "cpu"  # ``cpu`` or ``cuda``
    optimizer: Optional[str] = None  # class name of the optimizer, as in checkpoints; None: the command does not train
    start: Optional[str] = None  # checkpoint of ``--continue-once``; None: the option is not given
    saving: Any = None  # fairseq's checkpoint options, read at the end of each update; None: the command has none
    # batch_size, max_tokens, update_freq and num_procs of the training run; None: the command does not train
    batches: Optional[Mapping[str, Any]] = None


@dataclass(frozen=True)
class Part:
    """One training run in a stage: the main one, or the branch (model copy, trained with a decaying learning rate)."""

    first_update: int = 0  # number of updates of the optimizer before the stage
    num_updates: Optional[int] = None  # number of updates in the stage; None: the number of epochs limits the stage
    is_branch: bool = False  # whether the training run is the branch


@dataclass
class Feature(Options):
    """Base class of training features. Fields are options (see `options.opt`); a subclass overrides hooks."""

    # option of fairseq-train that alma-stream sets for the feature -> remedy if the user gives this option
    owned: ClassVar[Mapping[str, str]] = {}
    # checkpoint to evaluate if the feature is active: ``average``, ``best`` or ``branch``; None: the last checkpoint
    predicts_with: ClassVar[Optional[str]] = None

    @property
    def is_on(self) -> bool:
        """Return whether any option of the feature differs from its default."""
        return any(getattr(self, name) != option.default for name, option in options_of(type(self)).items())

    def check(self, run: PlannedRun) -> None:
        """Raise ValueError if the feature does not support the run. The message begins with the feature's option."""

    def for_part(self: "Own", part: Part) -> "Own":
        """Return a new feature without state for ``part``, one training run in a stage."""
        return replace(self)

    def describe(self, part: Part) -> dict[str, Any]:
        """Return the entries (key -> value) that the feature adds to ``anytime`` in stage.json."""
        return {}

    def prepare(self, setting: Setting) -> None:
        """Prepare the feature before the model is built; raise AlmaError if the feature does not fit the command."""

    def begin(self, checkpoint: dict[str, Any], setting: Setting) -> None:
        """Modify ``checkpoint`` (content of the starting checkpoint ``setting.start``) in place."""

    def around_forward(self, model: "nn.Module") -> ContextManager[Any]:
        """Return the context manager in which a forward pass runs."""
        return contextlib.nullcontext()

    def before_step(self, optimizer: Any, update: int) -> None:
        """Run before each step of an optimizer with ``param_groups``; ``update``: number of completed updates."""

    def after_step(self, model: "nn.Module", update: int) -> None:
        """Run after each optimizer step, with the new weights; ``update`` counts the updates before the step."""

    def count(self, logs: Sequence[Mapping[str, Any]]) -> None:
        """Process the log outputs of the criterion for an update: one log output per batch and process."""

    def to_test(self, model: "nn.Module") -> "Optional[Mapping[str, Tensor]]":
        """Return the weights to evaluate (name -> tensor), or None for the model's weights. Used only for images."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints: unique key -> tensors and plain Python values (no NumPy, no paths)."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the feature from the merged state of all features; keys may be missing."""


FEATURES: list[type[Feature]] = []  # all registered features, in the order in which their hooks are called
Kind = TypeVar("Kind", bound=type[Feature])
Own = TypeVar("Own", bound=Feature)


def register_feature(kind: Kind) -> Kind:
    """Register and return a feature class. Raises ValueError if another feature has an option of the same name."""
    for other in FEATURES:
        if shared := options_of(kind).keys() & options_of(other).keys():
            raise ValueError(
                f"{kind.__name__}: feature {other.__name__} also has option {min(shared)}; rename one of the options"
            )
    FEATURES.append(kind)
    return kind


@register_feature
@dataclass
class TokenCount(Feature):
    """Feature that counts the training tokens of a stage, and records changes of the batch size; always active.

    fairseq's token count restarts when a training run resumes at the start of an epoch.
    """

    is_on: ClassVar[bool] = True

    num_tokens: Any = field(default=0, init=False)
    first_update: int = field(default=0, init=False)
    batches: list[dict[str, Any]] = field(default_factory=list, init=False)
    _current: dict[str, Any] = field(default_factory=dict, init=False)

    def prepare(self, setting: Setting) -> None:
        self._current = dict(setting.batches or {})

    def before_step(self, optimizer: Any, update: int) -> None:
        if self._current and (not self.batches or self.batches[-1] | self._current != self.batches[-1]):
            self.batches.append({"from_update": update, **self._current})

    def count(self, logs: Sequence[Mapping[str, Any]]) -> None:
        # Keep the sum over processes as a tensor, because reading the value after each update would stall the GPU.
        self.num_tokens = self.num_tokens + sum(log["ntokens"] for log in logs)

    def state_dict(self) -> dict[str, Any]:
        given = {FIRST_UPDATE: self.first_update, BATCHES: self.batches}
        return {TRAIN_TOKENS: int(self.num_tokens), **{name: value for name, value in given.items() if value}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_tokens, self.first_update = state[TRAIN_TOKENS], state.get(FIRST_UPDATE, 0)
        self.batches = [*state.get(BATCHES, ())]


@dataclass
class Features:
    """The active features of a training run, in the order in which their hooks are called."""

    each: Sequence[Feature] = ()
    setting: Setting = field(default_factory=Setting)

    @classmethod
    def of(cls, values: Mapping[str, Any], setting: Setting) -> "Features":
        """Return the features that are active (`Feature.is_on`) in a task configuration of fairseq."""
        options = {name: option for kind in FEATURES for name, option in options_of(kind).items()}
        # fairseq's choices are enumerations.
        found = {name: getattr(values.get(name), "value", values.get(name)) for name in options}
        given = {name: each for name, each in found.items() if each not in (None, options[name].default_on(TRAINING))}
        return cls(setting=setting).with_options(given)

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> "Features":
        """Return the features that are active (`Feature.is_on`) in the parsed arguments of alma-stream."""
        return cls([each for kind in FEATURES if (each := kind.read(arguments)).is_on])

    def __getitem__(self, kind: type[Own]) -> Own:
        """Return the active feature of a class; if none is active, return a new feature with default options."""
        return next((each for each in self.each if isinstance(each, kind)), None) or kind()

    def with_options(self, values: Mapping[str, Any]) -> "Features":
        """Return the features that are active after setting the option fields in ``values`` (name -> value)."""
        given = {kind: {name: values[name] for name in options_of(kind) if name in values} for kind in FEATURES}
        changed = [replace(self[kind], **own) for kind, own in given.items()]
        return Features([feature for feature in changed if feature.is_on], self.setting)

    @property
    def predicts_with(self) -> str:
        """Return the checkpoint to evaluate: ``average``, ``best``, ``branch`` or ``last``."""
        return next((each.predicts_with for each in self.each if each.predicts_with is not None), "last")

    def check(self, run: PlannedRun) -> None:
        """Raise ValueError if features conflict or do not fit the run; the message begins with an option."""
        testing = [each.record().items() for each in self.each if each.predicts_with is not None]
        if len(testing) > 1:
            given = [
                " ".join(flag(name) + (value is not True) * f" {value}" for name, value in each) for each in testing
            ]
            raise ValueError(f"{given[0]}: {given[1]} also selects the checkpoint to evaluate; omit one of the options")
        self.call("check", run)

    def record(self, kind: Optional[str] = None) -> dict[str, Any]:
        """Return the options of the active features for run.json (field name -> value), without null values."""
        return {name: value for each in self.each for name, value in each.record(kind).items()}

    def words(self, part: Part) -> list[tuple[str, ...]]:
        """Return the fairseq-train arguments for ``part`` (a training run in a stage), in a tuple for each feature."""
        return [words for each in self.each if (words := tuple(each.for_part(part).words()))]

    def for_part(self, part: Part) -> "Features":
        return Features([each.for_part(part) for each in self.each], self.setting)

    def describe(self, part: Part) -> dict[str, Any]:
        """Return the value of ``anytime`` in stage.json; empty if no feature option is given."""
        own = {name: value for each in self.each for name, value in each.describe(part).items()}
        return {"predicts_with": self.predicts_with, **own} if self.record() else {}

    @contextlib.contextmanager
    def around_forward(self, model: "nn.Module") -> Iterator[None]:
        """Return the context manager for a forward pass. The context manager is also a function decorator.

        fairseq's training step disables autocast around the criterion. The task therefore decorates the criterion.
        """
        with contextlib.ExitStack() as contexts:
            for each in self.each:
                contexts.enter_context(each.around_forward(model))
            yield

    def to_test(self, model: "nn.Module") -> "Optional[Mapping[str, Tensor]]":
        """Return the first result of `Feature.to_test` that is not None, or None if no feature returns weights."""
        return next((weights for each in self.each if (weights := each.to_test(model)) is not None), None)

    def state_dict(self) -> dict[str, Any]:
        return {key: value for each in self.each for key, value in each.state_dict().items()}

    def call(self, hook: str, *args: Any) -> None:
        """Call the method named ``hook`` of each active feature with ``args``."""
        for each in self.each:
            getattr(each, hook)(*args)

    before_step, after_step = partialmethod(call, "before_step"), partialmethod(call, "after_step")
    count, load_state_dict = partialmethod(call, "count"), partialmethod(call, "load_state_dict")

    def prepare(self) -> None:
        self.call("prepare", self.setting)

    def begin(self, checkpoint: dict[str, Any]) -> None:
        self.call("begin", checkpoint, self.setting)


def import_from(path: Path) -> ModuleType:
    """Import a Python file or package folder, and return the module.

    A second call with the same file returns the same module. The file name need not be a valid module name. The code
    may import other modules from the folder of the file.
    """
    root = path.resolve()
    file = root / "__init__.py" if root.is_dir() else root
    if not file.is_file() or file.suffix != ".py":
        raise AlmaError(f"{path}: no Python code found; give a file X.py, or a folder that contains __init__.py")
    name = f"_user_code_{hashlib.sha256(os.fsencode(file)).hexdigest()}"
    if name not in sys.modules:
        USER_CODE.append(str(root))
        sys.path.append(str(root.parent))
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None  # holds for every .py file
        sys.modules[name] = importlib.util.module_from_spec(spec)
        with in_one_line():
            spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
