"""Lets fairseq's own commands read checkpoints through this package's gate, wherever one of its tasks is in use.

``fairseq-eval-lm``, ``-validate``, ``-interactive``, ``-generate`` and ``-train`` load a file by themselves, and build
what it says. All of them do so by ``checkpoint_utils.load_checkpoint_to_cpu``, the one function that is replaced here.
Under other tasks it does what it did.
"""

import functools
import sys
from typing import Any, Callable, Mapping, Optional

from fairseq import checkpoint_utils
from fairseq.dataclass.utils import overwrite_args_by_name
from omegaconf import DictConfig, OmegaConf

from fairseq_alma.checkpoints.checkpoint_file import Checkpoint, read_checkpoint
from fairseq_alma.errors import AlmaError

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
    """Return a checkpoint as fairseq takes it.

    Args:
        path: the file.
        arg_overrides: options of the command that replace those of the file, by name.

    Raises:
        AlmaError: it is none, or none that is built here.
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


def _replace_loader() -> None:
    load = checkpoint_utils.load_checkpoint_to_cpu
    if hasattr(load, "is_gate"):
        return

    @functools.wraps(load)
    def load_through_gate(
        path: str, arg_overrides: Optional[Mapping[str, Any]] = None, load_on_all_ranks: bool = False
    ) -> Any:
        if not _is_our_command():
            state = load(path, arg_overrides, load_on_all_ranks)
            if not _is_ours(state):
                return state
        return load_state(path, arg_overrides)

    load_through_gate.is_gate = True  # type: ignore[attr-defined]
    checkpoint_utils.load_checkpoint_to_cpu = load_through_gate


_replace_loader()
