"""The moving average of a model's weights that a checkpoint has beside the weights themselves.

It stands in ``extra_state`` under the name of the task's class, by the names of ``model``: a parameter that has two
names there, as input and output embeddings, has one here.
"""

from pathlib import Path
from typing import Any, Mapping, Optional

from torch import Tensor

from fairseq_alma.checkpoints.checkpoint_file import Checkpoint, read_checkpoint, write_checkpoint
from fairseq_alma.errors import AlmaError

AVERAGE = "average"
"""Key in a checkpoint's ``extra_state[class of the task]``: the averaged weights by the names of ``model``, fp32."""


def find_average(checkpoint: Checkpoint) -> Optional[dict[str, Any]]:
    """Return the part of ``extra_state`` that has an average; None: there is none."""
    for entry in checkpoint.get("extra_state", {}).values():
        if isinstance(entry, dict) and isinstance(entry.get(AVERAGE), dict):
            return entry
    return None


def write_average(path: Path, out: Path) -> None:
    """Write the averaged weights in a checkpoint as a checkpoint of their own; see `averaged_model`."""
    write_checkpoint(averaged_model(read_checkpoint(path), path), out)


def averaged_model(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    """Return a checkpoint whose weights are the average, for tests: it has no optimizer state.

    Args:
        checkpoint: as `read_checkpoint` returns it.
        path: its file, for the message.

    Raises:
        AlmaError: it has no average, or one of another model.
    """
    entry = find_average(checkpoint)
    if entry is None:
        raise AlmaError(f"{path}: has no averaged weights; train with --ema-half-life")
    weights = with_shared_names(checkpoint["model"], entry[AVERAGE])
    wrong = [name for name, tensor in checkpoint["model"].items() if weights[name].shape != tensor.shape]
    if wrong or entry[AVERAGE].keys() - weights.keys():
        raise AlmaError(f"{path}: its averaged weights are those of another model; remove it to train the stage again")
    states = {name: each for name, each in checkpoint["extra_state"].items() if each is not entry}
    averaged = {**checkpoint, "model": weights, "extra_state": states}
    averaged.pop("last_optimizer_state", None)
    return averaged


def with_shared_names(model: Mapping[str, Tensor], average: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the average under all names of ``model``; what was not averaged, as buffers, is the model's own."""
    by_place = {_place(model[name]): tensor for name, tensor in average.items() if name in model}
    return {name: average.get(name, by_place.get(_place(tensor), tensor)) for name, tensor in model.items()}


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()
