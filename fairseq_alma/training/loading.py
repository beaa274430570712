"""How fairseq's own commands load checkpoints: through this package's gate, and only into the model that they fit.

``fairseq-eval-lm``, ``-validate``, ``-interactive``, ``-generate`` and ``-train`` load a file by themselves, and build
what it says. All of them do so by ``checkpoint_utils.load_checkpoint_to_cpu``. And how a training gives a checkpoint a
second name, so that who loads it meanwhile finds a whole one. Four functions of fairseq are replaced here; under other
tasks they do what they did.
"""

import functools
import os
import shutil
import sys
from enum import Enum
from pathlib import Path
from typing import Any, Callable, Mapping, Optional

from fairseq import checkpoint_utils
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.file_io import PathManager
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.trainer import Trainer
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from fairseq_alma.checkpoints import UnfitCheckpoint
from fairseq_alma.checkpoints.architecture import refuse_other_shapes
from fairseq_alma.checkpoints.checkpoint_file import Checkpoint, read_checkpoint
from fairseq_alma.checkpoints.ensemble_file import check_dictionary
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError, causes, describe_fault
from fairseq_alma.options import options_of
from fairseq_alma.training.processes import of_first

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
_set_up: set[str] = set()
_changes: dict[str, Callable[[Checkpoint], None]] = {}


def note_task(name: str) -> None:
    """Note that a task of this package is set up: whatever this process loads from now on goes through the gate."""
    _set_up.add(name)


def change_when_loaded(path: str, change: Optional[Callable[[Checkpoint], None]]) -> None:
    """Note what this process does to a checkpoint when it loads it to begin a training with; None: nothing."""
    _changes.clear()
    if change is not None:
        _changes[path] = change


def load_state(path: str, arg_overrides: Optional[Mapping[str, Any]] = None) -> Checkpoint:
    """Return a checkpoint as fairseq takes it; of several processes the first reads it, and sends it to the others.

    Args:
        path: the file.
        arg_overrides: options of the command that replace those of the file, by name.

    Raises:
        AlmaError: it is none, or none that is built here.
    """
    state = of_first(lambda: read_checkpoint(path, mmap=False, needed=("optimizer_history", "extra_state")))
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
        state["optimizer_history"] = history[
            -1:
        ]  # fairseq reads the last, and adds one: a run of many stages grew by it
    state["cfg"] = OmegaConf.create(state["cfg"], flags={"allow_objects": True})
    if arg_overrides is not None:
        overwrite_args_by_name(state["cfg"], arg_overrides)
    return checkpoint_utils._upgrade_state_dict(state)


def _is_our_command() -> bool:
    """Tell whether a task of this package is in use: the command line names it, or it was set up."""
    return bool(_set_up) or any(word.rpartition("=")[2] in TASKS for word in sys.argv[1:])


def _is_ours(state: Any) -> bool:
    """Tell whether a file that was loaded for another task, or for none, names a task or a model of this package."""
    config = state.get("cfg")
    names = [OmegaConf.select(config, f"{part}._name") for part in ("task", "model")] if _is_config(config) else []
    return any(str(name).startswith("alma_") for name in names)


def _is_config(config: Any) -> bool:
    return isinstance(config, DictConfig)


def replaced(function: Callable, by: Callable) -> Callable:
    """Return what calls ``by(function, …)``, once only."""
    gate = f"{by.__module__}.{by.__qualname__}"
    gates = getattr(function, "gates", ())
    if gate in gates:
        return function

    @functools.wraps(function)
    def through_gate(*arguments: Any, **more: Any) -> Any:
        return by(function, *arguments, **more)

    through_gate.gates = (*gates, gate)  # type: ignore[attr-defined]
    return through_gate


def _load_through_gate(
    load: Callable, path: str, arg_overrides: Optional[Mapping[str, Any]] = None, load_on_all_ranks: bool = False
) -> Any:
    """Stand in for ``checkpoint_utils.load_checkpoint_to_cpu``."""
    if not _is_our_command():
        state = load(path, arg_overrides, load_on_all_ranks)
        if not _is_ours(state):
            return state
    return load_state(path, arg_overrides)


checkpoint_utils.load_checkpoint_to_cpu = replaced(checkpoint_utils.load_checkpoint_to_cpu, _load_through_gate)


def _name_again(copy: Callable, src_path: str, dst_path: str, overwrite: bool = False) -> bool:
    """Stand in for ``PathManager.copy``, by which fairseq writes over ``checkpoint_last.pt`` in place.

    A process that has it mapped, as that of another member, would be ended by SIGBUS. A second name is enough, and no
    byte is written twice, as whatever comes under one of the names later comes as another file.
    """
    if not _set_up or not overwrite:
        return copy(src_path, dst_path, overwrite)
    temporary = Path(f"{dst_path}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(src_path, temporary)
    except OSError:  # a file system without links
        shutil.copyfile(src_path, temporary)
    os.replace(temporary, dst_path)
    temporary.unlink(missing_ok=True)  # it stays where both were names of one file
    return True


PathManager.copy = staticmethod(replaced(PathManager.copy, _name_again))


@functools.cache
def shape_options() -> frozenset[str]:
    """Return the options that shape the networks of this package; a checkpoint to start from must share them."""
    ours = {each for each in MODEL_DATACLASS_REGISTRY.values() if each.__module__.startswith("fairseq_alma.")}
    return frozenset(name for each in ours for name, option in options_of(each).items() if option.shape)


def check_start(checkpoint: Checkpoint, path: str, model_cfg: Any, stream: Stream) -> None:
    """Raise AlmaError if a stage cannot start from a checkpoint: other architecture, sizes or vocabulary.

    Args:
        checkpoint: its content.
        path: its name, for the message.
        model_cfg: options of the model that is about to be built.
        stream: the stream that it will be trained on.
    """
    check_dictionary(checkpoint, path, stream)
    check_architecture(checkpoint, path, model_cfg)


def check_architecture(checkpoint: Checkpoint, path: str, model_cfg: Any) -> None:
    """Raise AlmaError if a checkpoint to start from has another architecture or other sizes; as `check_start`."""
    found = checkpoint["cfg"]["model"]
    kinds = [ARCH_MODEL_NAME_REGISTRY.get(config["_name"]) for config in (found, model_cfg)]
    if kinds[0] != kinds[1]:
        raise AlmaError(
            f"{path}: holds an {found['_name']}, the command builds an {model_cfg['_name']}; give --arch "
            f"{found['_name']}, or start from another checkpoint"
        )
    if differing := _other_shape(found, model_cfg):
        raise AlmaError(f"{path}: its model has other sizes than the command; give {_flags(differing)}")
    joint: Any = MODEL_REGISTRY.get(kinds[0])
    if hasattr(joint, "member_config"):
        members = [vars(joint.member_config(config)) for config in (found, model_cfg)]
        if differing := _other_shape(*members):
            raise AlmaError(
                f"{path}: its members are other models than the command's; give {_flags(differing)} in "
                f"--member-options, where it was trained with {found['member_options']!r}"
            )


def _other_shape(found: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that shape a network and are given otherwise than they were found, as they were found."""
    both = [name for name in given if name in shape_options() and name in found and given[name] is not None]
    return {name: _plain(found[name]) for name in both if _plain(found[name]) != _plain(given[name])}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Enum) else value


def _flags(options: Mapping[str, Any]) -> str:
    return " ".join(_flag(name, value) for name, value in options.items())


def _flag(name: str, value: Any) -> str:
    option = f"--{name.replace('_', '-')}"
    return f"{'' if value else 'no '}{option}" if isinstance(value, bool) else f"{option} {value!r}"


def check_weights(checkpoint: Checkpoint, path: str, model: nn.Module) -> None:
    """Raise AlmaError if a model of this package has other shapes than the checkpoint that it is to start from.

    `check_architecture` knows which option to name; this is for what it does not see, as sizes of a model's members.
    """
    if checkpoint["cfg"]["model"]["_name"].startswith("alma_"):
        remedy = "its model has other sizes than the command builds: give the options that it was trained with"
        refuse_other_shapes(checkpoint["model"], model, path, remedy)


def refuse_other_weights(model: nn.Module, path: str) -> None:
    """Let a model raise AlmaError when it is given weights of other names or shapes than its own.

    Args:
        model: what will load a checkpoint, also a stock model.
        path: the checkpoint, for the message.
    """

    def compare(module: nn.Module, weights: Mapping[str, Tensor], prefix: str, *unused: Any) -> None:
        if not prefix:
            remedy = "give the stream that it was trained on, and an unaltered checkpoint"
            refuse_other_shapes(weights, module, path, remedy)

    model.register_load_state_dict_pre_hook(compare)


# One line where fairseq-train cannot resume from a checkpoint's state of the training, where it shows a traceback. The
# weights were looked at before the model was built. What else a training resumes from, moments, learning-rate schedule,
# meters and position, is put in place by two functions of fairseq, which are replaced here.
_REMEDY = (
    "give the options that it was trained with, --reset-optimizer --reset-lr-scheduler --reset-meters "
    "--reset-dataloader to begin a new training with its weights, or an unaltered checkpoint"
)
_OTHER_BATCHES = "dataloader mismatch"


def _load_state(load: Callable, trainer: Trainer, filename: str, *arguments: Any, **more: Any) -> Any:
    """Stand in for ``Trainer.load_checkpoint``."""
    if trainer.cfg.task._name not in TASKS or not os.path.isfile(filename):
        return load(trainer, filename, *arguments, **more)
    _ = trainer.optimizer  # built here, as wrong options are no fault of the file
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


def _load_position(load: Callable, cfg: Any, trainer: Trainer, **arguments: Any) -> Any:
    """Stand in for ``checkpoint_utils.load_checkpoint``."""
    try:
        return load(cfg, trainer, **arguments)
    except RuntimeError as error:
        if trainer.cfg.task._name not in TASKS or _OTHER_BATCHES not in str(error):
            raise
        raise AlmaError(
            f"{cfg.save_dir}: its checkpoint is at a batch that an epoch of this command does not have; {_REMEDY}"
        ) from error


Trainer.load_checkpoint = replaced(Trainer.load_checkpoint, _load_state)
checkpoint_utils.load_checkpoint = replaced(checkpoint_utils.load_checkpoint, _load_position)
