"""What a checkpoint has beside weights: their moving average, and what the optimizer remembers of them. No fairseq."""

import math
from typing import Any, Mapping, Optional

import torch
from torch import Tensor

from fairseq_alma.checkpoints import AVERAGE, IMAGE_TASK_STATE, TASK_STATE, UnfitCheckpoint
from fairseq_alma.checkpoints.checkpoint_file import Checkpoint


def find_average(checkpoint: Checkpoint) -> Optional[dict[str, Any]]:
    """Return the part of ``extra_state`` that has an average; None: there is none."""
    entries = (checkpoint.get("extra_state", {}).get(key) for key in (TASK_STATE, IMAGE_TASK_STATE))
    return next((each for each in entries if isinstance(each, dict) and isinstance(each.get(AVERAGE), dict)), None)


def with_shared_names(model: Mapping[str, Tensor], average: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the average under all names of ``model``; what was not averaged, as buffers, is the model's own."""
    by_place = {_place(model[name]): tensor for name, tensor in average.items() if name in model}
    return {name: average.get(name, by_place.get(_place(tensor), tensor)) for name, tensor in model.items()}


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


_STEP = "step"
_MOMENTS = {  # by the names of torch's and fairseq's classes: what an update looks up, in the parameter's shape
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adadelta": ("square_avg", "acc_delta"),
    "Adagrad": ("sum",),
    "Adamax": ("exp_avg", "exp_inf"),
    "SGD": (),
    "NAG": (),
}
_WITHOUT_STEP = ("SGD", "NAG")
_IN_NO_GROUP = "differentiable"  # torch adds it to the defaults alone


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Check what an optimizer has just loaded; of kinds that are not listed here, whose moments have any shape, less.

    Raises:
        UnfitCheckpoint: its options, or what it remembers of a parameter, are others than those of this optimizer.
    """
    kind = next((each.__name__ for each in type(optimizer).__mro__ if each.__name__ in _MOMENTS), None)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for group in optimizer.param_groups:
        _check_options(group, optimizer.defaults)
    if optimizer.state.keys() - {*parameters}:
        raise UnfitCheckpoint(f"the optimizer in it has other parameters than the {len(parameters)} of its model")
    for number, parameter in enumerate(parameters):
        entry = optimizer.state.get(parameter, {})
        if not isinstance(entry, dict):
            raise UnfitCheckpoint(f"the optimizer in it has no moments of parameter {number}")
        if kind is not None and entry:
            _check_entry(kind, number, parameter, entry)


def _check_options(found: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name, own in known.items():
        if name not in found:
            if name == _IN_NO_GROUP:
                continue
            raise UnfitCheckpoint(f"the optimizer in it lacks the option {name}")
        if not _is_alike(found[name], own):
            raise UnfitCheckpoint(
                f"the optimizer in it has {repr(found[name])[:60]} as {name}, such as {own!r} is needed"
            )


def _is_alike(found: Any, own: Any) -> bool:
    """Tell whether an option has the kind of the command's own: switches are the same, numbers are finite."""
    if own is None or isinstance(own, bool):
        return found is own
    if isinstance(own, (list, tuple)):
        is_list = isinstance(found, (list, tuple)) and len(found) == len(own)
        return is_list and all(_is_alike(*pair) for pair in zip(found, own, strict=True))
    return _is_number(found) if _is_number(own) else type(found) is type(own)


def _check_entry(kind: str, number: int, parameter: Tensor, entry: Mapping[str, Any]) -> None:
    needed = _MOMENTS[kind] if kind in _WITHOUT_STEP else (_STEP, *_MOMENTS[kind])
    if lacking := [name for name in needed if entry.get(name) is None]:
        raise UnfitCheckpoint(f"the optimizer in it lacks {', '.join(lacking)} of parameter {number}")
    for name, value in entry.items():
        if name == _STEP:
            steps = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
            fits = _is_number(steps) and steps >= 0
        else:
            fits = value is None or (isinstance(value, Tensor) and value.shape == parameter.shape)
        if not fits:
            shape = tuple(value.shape) if isinstance(value, Tensor) else repr(value)[:60]
            fitting = "a number of at least 0" if name == _STEP else tuple(parameter.shape)
            raise UnfitCheckpoint(f"the optimizer's {name} of parameter {number} is {shape}, {fitting} is needed")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
