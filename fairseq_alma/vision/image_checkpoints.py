"""Checkpoints of models of images: plain fairseq checkpoints, and the file that an unfinished training goes on from."""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Mapping, Optional

import torch
from torch import Tensor

from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.checkpoint_file import read_checkpoint, write_checkpoint

LAST = "checkpoint_last.pt"
UNFINISHED = "training.pt"
TRAINING_KEY = "alma_image_training"
"""Key in a checkpoint's ``extra_state``: what `TrainedModel` says beside weights and configuration."""
_PREFIX = "network."


@dataclass(frozen=True)
class TrainedModel:
    """One model that is trained to its end.

    Attributes:
        state: its weights, by the names that its network gives them.
        grown: options that growth has changed.
        num_updates: updates of its last stage.
        num_images: images that these updates trained on, each pass counted.
        growth: what the growth step before its last stage did; empty where it did not grow.
    """

    state: Mapping[str, Tensor]
    grown: Mapping[str, Any]
    num_updates: int
    num_images: int
    growth: Mapping[str, Any] = field(default_factory=dict)


def write_model(path: Path, model: TrainedModel, config: Mapping[str, Any]) -> None:
    """Write a checkpoint that fairseq's commands read.

    Args:
        path: the file.
        model: the model.
        config: ``cfg``, see `ImageSettings.checkpoint_config`.
    """
    facts = asdict(TrainedModel({}, model.grown, model.num_updates, model.num_images, model.growth))
    del facts["state"]
    checkpoint = {
        "args": None,
        "cfg": dict(config),
        "model": {_PREFIX + name: tensor.detach().cpu().clone() for name, tensor in model.state.items()},
        "optimizer_history": [
            {
                "criterion_name": "AlmaImageCrossEntropy",
                "optimizer_name": str(config["optimizer"]["_name"]),
                "lr_scheduler_state": {},
                "num_updates": model.num_updates,
            }
        ],
        "task_state": {},
        "extra_state": {TRAINING_KEY: facts},
    }
    write_checkpoint(checkpoint, path)


def read_model(path: Path) -> TrainedModel:
    """Read a checkpoint that `write_model` wrote.

    Raises:
        AlmaError: it is missing, damaged, or another command's.
    """
    checkpoint = read_checkpoint(path, mmap=False)
    facts = checkpoint.get("extra_state", {}).get(TRAINING_KEY)
    if not isinstance(facts, dict):
        raise AlmaError(f"{path}: not written by alma-stream; remove it to train the stage again")
    state = {name.removeprefix(_PREFIX): tensor for name, tensor in checkpoint["model"].items()}
    return TrainedModel(state, **facts)


def write_unfinished(path: Path, state: Mapping[str, Any]) -> None:
    """Save a training that goes on; the file before stays until the new one is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    torch.save(dict(state), temporary)
    os.replace(temporary, path)


def read_unfinished(path: Path) -> Optional[dict[str, Any]]:
    """Return the training that was cut off, or None where there is none."""
    if not path.is_file():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise AlmaError(f"{path}: damaged ({error}); remove it to train the stage from its beginning") from error


def remove_model(folder: Path) -> None:
    """Remove what is kept of a model, and its folder if nothing else is in it."""
    for name in (LAST, UNFINISHED):
        (folder / name).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
