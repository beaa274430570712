"""How fairseq's own commands load checkpoints: through this package's gate, and only into the model that they fit.

Two functions of fairseq are replaced; under other tasks they do what they did:

- ``checkpoint_utils.load_checkpoint_to_cpu``, by which ``fairseq-train``, ``-eval-lm``, ``-validate``, ``-interactive``
  and ``-generate`` load and unpickle every file: no code of a file may run, and only models built here are loaded;
- ``Trainer.load_checkpoint``, which shows a traceback for a training state that does not fit the command.
"""

import functools
import os
import sys
from enum import Enum
from typing import Any, Callable, Mapping, Optional

from fairseq import checkpoint_utils
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.trainer import Trainer
from omegaconf import OmegaConf
from torch import Tensor, nn

from fairseq_alma.checkpoints import UnfitCheckpoint
from fairseq_alma.checkpoints.architecture import refuse_other_shapes
from fairseq_alma.checkpoints.checkpoint_file import Checkpoint, read_checkpoint
from fairseq_alma.errors import AlmaError, causes, describe_fault
from fairseq_alma.options import flag, options_of

TASKS = ("alma_lm", "alma_image_classification")
# fairseq-validate sets up the task and the criterion that the file names: ours, and those of stock language models.
_BUILT = {
    "task": (*TASKS, "language_modeling"),
    "criterion": (
        "alma_switch_cross_entropy",
        "alma_image_cross_entropy",
        "cross_entropy",
        "label_smoothed_cross_entropy",
        "adaptive_loss",
    ),
}
_REMEDY = (
    "give the options that it was trained with, --reset-optimizer --reset-lr-scheduler --reset-meters "
    "--reset-dataloader to begin a new training with its weights, or an unaltered checkpoint"
)
_set_up: set[str] = set()
_changes: dict[str, Callable[[Checkpoint], None]] = {}


def note_task(name: str) -> None:
    """Note that a task of this package is set up: from now on this process loads everything through the gate."""
    _set_up.add(name)


def change_when_loaded(path: str, change: Callable[[Checkpoint], None]) -> None:
    """Let this process change a checkpoint, in place, when it loads it."""
    _changes.clear()
    _changes[path] = change


def load_state(path: str, arg_overrides: Optional[Mapping[str, Any]] = None) -> Checkpoint:
    """Return a checkpoint as fairseq takes it; ``arg_overrides`` replace options of the file, by name.

    Raises:
        AlmaError: it is no checkpoint, or not one of a model that this package builds.
    """
    state = read_checkpoint(path, mmap=False, needed=("optimizer_history", "extra_state"))
    for part, known in _BUILT.items():
        options = state["cfg"].get(part)
        name = options.get("_name") if isinstance(options, dict) else None
        if options is not None and name not in known:
            raise AlmaError(
                f"{path}: {part} {str(name)[:60]} is not set up from a checkpoint here, only {', '.join(known)} are; "
                "give a checkpoint that fairseq-train or alma-grow wrote"
            )
    if path in _changes:
        _changes[path](state)
    if history := state.get("optimizer_history"):
        state["optimizer_history"] = history[-1:]  # fairseq reads the last and appends one: it would grow with stages
    state["cfg"] = OmegaConf.create(state["cfg"], flags={"allow_objects": True})
    if arg_overrides is not None:
        overwrite_args_by_name(state["cfg"], arg_overrides)
    return checkpoint_utils._upgrade_state_dict(state)


def _load_through_gate(
    load: Callable, path: str, arg_overrides: Optional[Mapping[str, Any]] = None, load_on_all_ranks: bool = False
) -> Any:
    """Stand in for ``checkpoint_utils.load_checkpoint_to_cpu``."""
    if _set_up or any(word.rpartition("=")[2] in TASKS for word in sys.argv[1:]):
        return load_state(path, arg_overrides)
    return load(path, arg_overrides, load_on_all_ranks)


def _load_training(load: Callable, trainer: Trainer, filename: str, *arguments: Any, **more: Any) -> Any:
    """Stand in for ``Trainer.load_checkpoint``."""
    if trainer.cfg.task._name not in TASKS or not os.path.isfile(filename):
        return load(trainer, filename, *arguments, **more)
    _ = trainer.optimizer  # built here: wrong options are no fault of the file
    try:
        return load(trainer, filename, *arguments, **more)
    except Exception as error:
        for each in causes(error):
            if isinstance(each, AlmaError):
                raise each from None
        if describe_fault(error) is not None:
            raise
        is_sentence = isinstance(error, (AssertionError, ValueError, UnfitCheckpoint))
        reason = str(error) if is_sentence else f"{type(error).__name__}: {error}"
        raise AlmaError(f"{filename}: no training resumes from it ({reason[:300]}); {_REMEDY}") from error


def replaced(function: Callable, by: Callable) -> Callable:
    """Return a function that calls ``by(function, …)``; replacing it again changes nothing."""
    if getattr(function, "is_replaced", False):
        return function

    @functools.wraps(function)
    def call(*arguments: Any, **more: Any) -> Any:
        return by(function, *arguments, **more)

    call.is_replaced = True  # type: ignore[attr-defined]
    return call


checkpoint_utils.load_checkpoint_to_cpu = replaced(checkpoint_utils.load_checkpoint_to_cpu, _load_through_gate)
Trainer.load_checkpoint = replaced(Trainer.load_checkpoint, _load_training)


@functools.cache
def shape_options() -> frozenset[str]:
    """Return the options that shape the networks of this package; a checkpoint to start from must share them."""
    ours = {each for each in MODEL_DATACLASS_REGISTRY.values() if each.__module__.startswith("fairseq_alma.")}
    return frozenset(name for each in ours for name, option in options_of(each).items() if option.shape)


def check_architecture(checkpoint: Checkpoint, path: str, model_cfg: Any) -> None:
    """Raise AlmaError if a checkpoint to start from has another architecture or other sizes than a model to build."""
    found = checkpoint["cfg"]["model"]
    kinds = [ARCH_MODEL_NAME_REGISTRY.get(config["_name"]) for config in (found, model_cfg)]
    if kinds[0] != kinds[1]:
        raise AlmaError(
            f"{path}: holds an {found['_name']}, the command builds an {model_cfg['_name']}; give --arch "
            f"{found['_name']}, or start from another checkpoint"
        )
    if differing := _differing_options(found, model_cfg):
        raise AlmaError(f"{path}: its model has other sizes than the command; give {differing}")
    joint: Any = MODEL_REGISTRY.get(kinds[0])
    if hasattr(joint, "member_config"):
        members = [vars(joint.member_config(config)) for config in (found, model_cfg)]
        if differing := _differing_options(*members):
            raise AlmaError(
                f"{path}: its members are other models than the command's; give {differing} in --member-options, "
                f"where it was trained with {found['member_options']!r}"
            )


def _differing_options(found: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Return the options that shape a network and differ, as words with the values that were found."""
    words = []
    for name in given:
        if name not in shape_options() or name not in found or given[name] is None:
            continue
        there, here = (str(each) if isinstance(each, Enum) else each for each in (found[name], given[name]))
        if there != here and isinstance(there, bool):
            words.append(flag(name) if there else f"no {flag(name)}")
        elif there != here:
            words.append(f"{flag(name)} {there!r}")
    return " ".join(words)


def check_weights(checkpoint: Checkpoint, path: str, model: nn.Module) -> None:
    """Raise AlmaError if a model of this package has other shapes than the checkpoint that it is to start from.

    `check_architecture` names the option; this covers what it does not see, such as the sizes of members.
    """
    if checkpoint["cfg"]["model"]["_name"].startswith("alma_"):
        remedy = "its model has other sizes than the command builds: give the options that it was trained with"
        refuse_other_shapes(checkpoint["model"], model, path, remedy)


def refuse_other_weights(model: nn.Module, path: str) -> None:
    """Let a model, also a stock one, raise AlmaError when it is given weights of other names or shapes than its own."""

    def compare(module: nn.Module, weights: Mapping[str, Tensor], prefix: str, *unused: Any) -> None:
        if not prefix:
            remedy = "give the stream that it was trained on, and an unaltered checkpoint"
            refuse_other_shapes(weights, module, path, remedy)

    model.register_load_state_dict_pre_hook(compare)
