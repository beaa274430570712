"""Load checkpoints in fairseq's commands with `read_checkpoint`, and check tensor shapes.

This module replaces two functions of fairseq for tasks of this package:

- ``checkpoint_utils.load_checkpoint_to_cpu`` unpickles files. The replacement runs no code from a file.
- ``Trainer.load_checkpoint`` raises many types of errors if a training state does not match the command. The
  replacement raises AlmaError with a one-line message.
"""

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
from fairseq_alma.checkpoints.checkpoint_file import ENSEMBLE_ARCH, Checkpoint, read_checkpoint, refuse_other_shapes
from fairseq_alma.errors import AlmaError, causes, describe_fault
from fairseq_alma.options import flag, options_of

TASKS = ("alma_lm", "alma_image_classification")
_STOCK_CRITERIONS = ("cross_entropy", "label_smoothed_cross_entropy", "adaptive_loss")
# fairseq-validate builds the task and the criterion that a checkpoint names. Only these names are allowed.
_ALLOWED = {
    "task": (*TASKS, "language_modeling"),
    "criterion": ("alma_switch_cross_entropy", "alma_image_cross_entropy", *_STOCK_CRITERIONS),
}
_REMEDY = (
    "give the options of the interrupted run, or --reset-optimizer --reset-lr-scheduler --reset-meters "
    "--reset-dataloader to start a new training run from the weights in the checkpoint"
)
_changes: dict[str, Callable[[Checkpoint], None]] = {}
_stock_load, _stock_load_training = checkpoint_utils.load_checkpoint_to_cpu, Trainer.load_checkpoint


def load_for_task(path: str, change: Callable[[Checkpoint], None]) -> None:
    """Make fairseq load checkpoints with `load_state`; ``change`` modifies the dict loaded from ``path`` in place."""
    _changes.clear()
    _changes[path] = change


def load_state(path: str, arg_overrides: Optional[Mapping[str, Any]] = None) -> Checkpoint:
    """Load a checkpoint in fairseq's format. ``arg_overrides`` (name -> value) replaces options in the checkpoint.

    Raises:
        AlmaError: the file is missing or damaged, or the model, task or criterion is not supported.
    """
    state = read_checkpoint(path, mmap=False, needed=("optimizer_history", "extra_state"))
    for part, allowed in _ALLOWED.items():
        options = state["cfg"].get(part)
        name = options.get("_name") if isinstance(options, dict) else None
        if options is not None and name not in allowed:
            raise AlmaError(
                f"{path}: expected {part} {' or '.join(allowed)}, found {str(name)[:60]}; "
                "give a checkpoint written by fairseq-train or alma-grow"
            )
    if path in _changes:
        _changes[path](state)
    state["optimizer_history"] = state["optimizer_history"][-1:]  # fairseq reads only the last entry
    state["cfg"] = OmegaConf.create(state["cfg"], flags={"allow_objects": True})
    if arg_overrides is not None:
        overwrite_args_by_name(state["cfg"], arg_overrides)
    return checkpoint_utils._upgrade_state_dict(state)


def _load_checkpoint_to_cpu(
    path: str, arg_overrides: Optional[Mapping[str, Any]] = None, load_on_all_ranks: bool = False
) -> Any:
    if _changes or any(word.rpartition("=")[2] in TASKS for word in sys.argv[1:]):
        return load_state(path, arg_overrides)
    return _stock_load(path, arg_overrides, load_on_all_ranks)


def _load_training(trainer: Trainer, filename: str, *arguments: Any, **more: Any) -> Any:
    if trainer.cfg.task._name not in TASKS or not os.path.isfile(filename):
        return _stock_load_training(trainer, filename, *arguments, **more)
    _ = trainer.optimizer  # build the optimizer first: errors in optimizer options are not errors in the file
    options = trainer.cfg.checkpoint
    try:
        extra_state = _stock_load_training(trainer, filename, *arguments, **more)
        state = (extra_state or {}).get(type(trainer.task).__name__)
        if state and options.reset_dataloader and not options.reset_optimizer:  # fairseq omits the state of the task
            trainer.task.set_checkpoint_dict(state)
        return extra_state
    except Exception as error:
        for each in causes(error):
            if isinstance(each, AlmaError):
                raise each from None
        if describe_fault(error) is not None:
            raise
        is_sentence = isinstance(error, (AssertionError, ValueError, UnfitCheckpoint))
        reason = str(error) if is_sentence else f"{type(error).__name__}: {error}"
        raise AlmaError(f"{filename}: cannot resume training ({reason[:300]}); {_REMEDY}") from error


checkpoint_utils.load_checkpoint_to_cpu = _load_checkpoint_to_cpu
Trainer.load_checkpoint = _load_training


def check_architecture(checkpoint: Checkpoint, path: str, model_cfg: Any) -> None:
    """Raise AlmaError if ``model_cfg`` and the checkpoint differ in architecture or in options that set shapes."""
    found = checkpoint["cfg"]["model"]
    kinds = [ARCH_MODEL_NAME_REGISTRY.get(config["_name"]) for config in (found, model_cfg)]
    if kinds[0] != kinds[1]:
        remedy = "" if found["_name"] == ENSEMBLE_ARCH else f"give --arch {found['_name']}, or "
        expected = f"expected architecture {model_cfg['_name']}, found {found['_name']}"
        raise AlmaError(f"{path}: {expected}; {remedy}start from another checkpoint")
    if differing := _differing_options(found, model_cfg):
        raise AlmaError(f"{path}: the model sizes in this file differ from the command line; give {differing}")
    joint: Any = MODEL_REGISTRY.get(kinds[0])
    if hasattr(joint, "member_config"):
        of_members = [(config["member_arch"], config["member_options"]) for config in (found, model_cfg)]
        members = [vars(joint.member_config(*options)[1]) for options in of_members]
        if differing := _differing_options(*members):
            raise AlmaError(
                f"{path}: the member options in this file ({found['member_options']!r}) differ from the command line; "
                f"give {differing} in --member-options"
            )


def _differing_options(found: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Return the options in ``found`` that set tensor shapes and differ from ``given``, as command-line arguments."""
    ours = {each for each in MODEL_DATACLASS_REGISTRY.values() if each.__module__.startswith("fairseq_alma.")}
    shape = {name for each in ours for name, option in options_of(each).items() if option.shape}
    words = []
    for name in given:
        if name not in shape or name not in found or given[name] is None:
            continue
        there, here = (str(each) if isinstance(each, Enum) else each for each in (found[name], given[name]))
        if there != here:
            no = "" if there else "no "
            words.append(f"{no}{flag(name)}" if isinstance(there, bool) else f"{flag(name)} {there!r}")
    return " ".join(words)


def check_weights(checkpoint: Checkpoint, path: str, model: nn.Module) -> None:
    """Raise AlmaError if a model of this package and its starting checkpoint differ in tensor names or shapes.

    `check_architecture` compares options. This function compares all shapes, including shapes that no option sets.
    """
    remedy = "give the options with which the checkpoint was trained"
    if checkpoint["cfg"]["model"]["_name"].startswith("alma_"):
        refuse_other_shapes(checkpoint["model"], model, path, remedy)


def refuse_other_weights(model: nn.Module, path: str) -> None:
    """Make ``model.load_state_dict`` raise AlmaError if names or shapes of the weights do not match the model."""

    def compare(module: nn.Module, weights: Mapping[str, Tensor], prefix: str, *unused: Any) -> None:
        if not prefix:
            refuse_other_shapes(weights, module, path, "give an unaltered checkpoint and its training stream")

    model.register_load_state_dict_pre_hook(compare)
