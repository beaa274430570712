"""The trained models of a run: plain fairseq checkpoints on the disk, and the same in memory for the next stage.

Also the file that an unfinished training resumes from.
"""

import contextlib
import sys
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Sequence

import torch
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from fairseq_alma.checkpoints import LAST_CHECKPOINT
from fairseq_alma.checkpoints.checkpoint_file import load_archive, read_checkpoint, write_checkpoint
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import open_atomically, sweep
from fairseq_alma.images.image_classifier import GrownLayers
from fairseq_alma.images.image_settings import ImageSettings
from fairseq_alma.images.networks import ImageNetwork, NetworkFlops, count_flops
from fairseq_alma.learners.learner import ModelId
from fairseq_alma.runs.run_folder import AVERAGE, BRANCH, RunFolder, predicting_checkpoint
from fairseq_alma.terminal import print_line

UNFINISHED = "training.pt"
TRAINING_KEY = "alma_image_training"
"""Key in a checkpoint's ``extra_state``: what `TrainedModel` says beside weights and configuration."""
_FACTS = {"grown": dict, "num_updates": int, "num_images": int, "growth": dict}
_PREFIX = "network."


@dataclass(frozen=True)
class TrainedModel:
    """One trained model.

    Attributes:
        state: weights, by the names of its network.
        grown: what growth has changed; its file has it as options of the model.
        num_updates: updates of its last stage.
        num_images: images of these updates, each pass counted.
        growth: record of the growth step before its last stage; empty without one.
        tested: weights that predict instead, an average or a copy; they have a file of their own.
    """

    state: Mapping[str, Tensor]
    grown: GrownLayers
    num_updates: int
    num_images: int
    growth: Mapping[str, Any] = field(default_factory=dict)
    tested: Optional[Mapping[str, Tensor]] = None

    @property
    def predicting(self) -> "TrainedModel":
        """The model with the weights that predict."""
        return self if self.tested is None else replace(self, state=self.tested, tested=None)


def write_model(path: Path, model: TrainedModel, config: Mapping[str, Any]) -> None:
    """Write a checkpoint that fairseq's commands read; ``config`` is its ``cfg``, `ImageSettings.checkpoint_config`."""
    counts = {"num_updates": model.num_updates, "num_images": model.num_images}
    history = {
        "criterion_name": "AlmaImageCrossEntropy",
        "optimizer_name": str(config["optimizer"]["_name"]),
        "lr_scheduler_state": {},
        "num_updates": model.num_updates,
    }
    checkpoint = {
        "args": None,
        "cfg": dict(config),
        "model": {_PREFIX + name: tensor.detach().cpu().clone() for name, tensor in model.state.items()},
        "optimizer_history": [history],
        "task_state": {},
        "extra_state": {TRAINING_KEY: {"grown": model.grown.options(), **counts, "growth": dict(model.growth)}},
    }
    write_checkpoint(checkpoint, path)


def read_model(path: Path, read_grown: Callable[[Mapping[str, Any]], GrownLayers]) -> TrainedModel:
    """Read a checkpoint that `write_model` wrote; ``read_grown`` is that of `ImageSettings`.

    Raises:
        AlmaError: it is missing, damaged, or another command's.
    """
    remedy = f"remove {path.parent.parent} to train that stage again"
    checkpoint = read_checkpoint(path, mmap=False, remedy=remedy)
    extra = checkpoint.get("extra_state")
    facts = extra.get(TRAINING_KEY) if isinstance(extra, dict) else None
    if not isinstance(facts, dict):
        raise AlmaError(f"{path}: not written by alma-stream; {remedy}")
    weights = checkpoint["model"]
    whole = facts.keys() == _FACTS.keys() and all(isinstance(facts[name], kind) for name, kind in _FACTS.items())
    if not whole or not isinstance(weights, dict) or not all(isinstance(each, Tensor) for each in weights.values()):
        raise AlmaError(f"{path}: damaged, it is not what alma-stream writes; {remedy}")
    try:
        grown = read_grown(facts["grown"])
    except (OmegaConfBaseException, AlmaError) as error:
        raise AlmaError(f"{path}: not the weights of this run's network ({error}); {remedy}") from error
    state = {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items()}
    return TrainedModel(state, grown, facts["num_updates"], facts["num_images"], facts["growth"])


def write_unfinished(path: Path, state: Mapping[str, Any]) -> None:
    """Save an unfinished training, replacing the file at once."""
    with open_atomically(path) as file:
        torch.save(dict(state), file)


def read_unfinished(path: Path) -> Optional[dict[str, Any]]:
    """Return the saved state of an unfinished training; None if there is none or the file is damaged."""
    if not path.is_file():
        return None
    state = None
    with contextlib.suppress(Exception):  # of many kinds
        state = load_archive(path, mmap=False)
    if not isinstance(state, dict):
        print_line(f"note: {path}: damaged, the stage is trained from its beginning", sys.stderr)
        return None
    return state


def remove_unfinished(path: Path) -> None:
    """Remove the file of an unfinished training, and temporary files that a kill left."""
    path.unlink(missing_ok=True)
    sweep(path.parent)


def remove_model(folder: Path) -> None:
    """Remove a model's files, and its folder if nothing else is in it."""
    for here, names in ((folder / BRANCH, (LAST_CHECKPOINT,)), (folder, (LAST_CHECKPOINT, AVERAGE, UNFINISHED))):
        for name in names:
            (here / name).unlink(missing_ok=True)
        if here.is_dir() and not any(here.iterdir()):
            here.rmdir()


class ModelStore:
    """Trained models of a run.

    Args:
        folder: the run.
        settings: of the run.
        predicts_with: ``last`` weights of a model, or an average or copy that has a file of its own.
    """

    def __init__(self, folder: RunFolder, settings: ImageSettings, predicts_with: str = "last") -> None:
        self.folder, self.settings, self.predicts_with = folder, settings, predicts_with
        self.models: dict[ModelId, TrainedModel] = {}
        self.flops: dict[GrownLayers, NetworkFlops] = {}
        self.built: Optional[tuple[list[ModelId], ImageNetwork]] = None

    def __contains__(self, model: ModelId) -> bool:
        return self._path(model).is_file()

    def is_complete(self, model: ModelId) -> bool:
        """Return whether a model's files are complete: the directory of a zip file is at its end."""
        return all(zipfile.is_zipfile(path) for path in (self._tested(model), self._path(model)))

    def __getitem__(self, model: ModelId) -> TrainedModel:
        """Return a model. Raises AlmaError if it is gone."""
        if model not in self.models:
            if model not in self:
                raise AlmaError(
                    f"{self._path(model)}: missing, but a later stage needs it; remove "
                    f"{self.folder.stage_folder(model.stage)} to train that stage again"
                )
            self.models[model] = self._read(model)
        return self.models[model]

    def __setitem__(self, model: ModelId, trained: TrainedModel) -> None:
        """Add a model and write its checkpoint."""
        config = self.settings.checkpoint_config(trained.grown)
        if trained.tested is not None:  # first: a model exists once its last checkpoint does
            write_model(self._tested(model), trained.predicting, config)
        write_model(self._path(model), trained, config)
        self.models[model] = trained

    def remove(self, gone: Sequence[ModelId]) -> None:
        for model in gone:
            remove_model(self.folder.model_folder(model))
            self.models.pop(model, None)

    def network_of(self, models: Sequence[ModelId]) -> ImageNetwork:
        """Build the network of some models side by side; the last one is kept."""
        if self.built is None or self.built[0] != [*models]:
            network = build_network(self.settings, [self[model].predicting for model in models])
            self.built = ([*models], network)
        return self.built[1]

    def flops_of(self, grown: GrownLayers) -> NetworkFlops:
        """Return the operations of one model of this size."""
        if grown not in self.flops:
            network = self.settings.build(self.settings.num_joint, grown)
            for parameter in network.parameters():
                torch.nn.init.zeros_(parameter)
            self.flops = {grown: count_flops(network, self.settings.stream.shape)}
        return self.flops[grown]

    def _read(self, model: ModelId) -> TrainedModel:
        trained = read_model(self._path(model), self.settings.read_grown)
        try:
            build_network(self.settings, [trained])
        except (KeyError, RuntimeError, AlmaError) as error:
            raise AlmaError(
                f"{self._path(model)}: not the weights of this run's network ({error}); remove "
                f"{self.folder.stage_folder(model.stage)} to train that stage again"
            ) from error
        if self.predicts_with == "last":
            return trained
        return replace(trained, tested=read_model(self._tested(model), self.settings.read_grown).state)

    def _tested(self, model: ModelId) -> Path:
        return predicting_checkpoint(self.folder, model, self.predicts_with)

    def _path(self, model: ModelId) -> Path:
        return self.folder.checkpoint(model)


def build_network(settings: ImageSettings, models: Sequence[TrainedModel]) -> ImageNetwork:
    """Build models of the same architecture side by side, or the members of a joint one, on the run's device."""
    if settings.is_joint:
        network = settings.build(settings.num_joint, models[0].grown)
        network.load_state_dict(dict(models[0].state))
    else:
        network = settings.build(len(models), models[0].grown)
        for member, model in enumerate(models):
            network.load_member_state(member, model.state)
    return network.to(settings.device)
