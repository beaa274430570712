"""Store the trained models of a run in fairseq checkpoints and in memory. Write the state of unfinished trainings."""

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
from fairseq_alma.files import open_atomically
from fairseq_alma.images.image_classifier import GrownLayers
from fairseq_alma.images.image_settings import ImageSettings
from fairseq_alma.images.networks import ImageNetwork, NetworkFlops, count_flops, load_exactly
from fairseq_alma.learners.learner import ModelId
from fairseq_alma.runs.run_folder import AVERAGE, BRANCH, RunFolder, predicting_checkpoint
from fairseq_alma.terminal import print_line

UNFINISHED = "training.pt"
TRAINING_KEY = "alma_image_training"
"""Key in ``extra_state`` of a checkpoint; the value contains the attributes of `TrainedModel`, except the weights."""
_FACTS = {"grown": dict, "num_updates": int, "num_images": int, "growth": dict}
_PREFIX = "network."


@dataclass(frozen=True)
class TrainedModel:
    """Weights of a trained model, and a record of the training.

    Attributes:
        state: state dictionary of the network.
        grown: layer sizes after growth, which a checkpoint stores as model options.
        num_updates: number of updates in the last stage that trained the model, without updates of the branch (copy of
            the model that is trained with a decaying learning rate).
        num_images: number of training images in this stage, including images of the branch, counted in each epoch.
        growth: record of the growth step before these updates; empty without growth.
        tested: weights to predict with: average of weights, or weights of the branch; None: ``state``.
    """

    state: Mapping[str, Tensor]
    grown: GrownLayers
    num_updates: int
    num_images: int
    growth: Mapping[str, Any] = field(default_factory=dict)
    tested: Optional[Mapping[str, Tensor]] = None

    @property
    def predicting(self) -> "TrainedModel":
        """Return a model whose ``state`` contains the weights to predict with."""
        return self if self.tested is None else replace(self, state=self.tested, tested=None)


def write_model(path: Path, model: TrainedModel, config: Mapping[str, Any]) -> None:
    """Write a checkpoint that fairseq's commands can load; ``config`` comes from `ImageSettings.checkpoint_config`."""
    history = {
        "criterion_name": "AlmaImageCrossEntropy",
        "optimizer_name": str(config["optimizer"]["_name"]),
        "lr_scheduler_state": {},
        "num_updates": model.num_updates,
    }
    facts = {
        "grown": model.grown.options(),
        "num_updates": model.num_updates,
        "num_images": model.num_images,
        "growth": dict(model.growth),
    }
    checkpoint = {
        "args": None,
        "cfg": dict(config),
        "model": {_PREFIX + name: tensor.detach().cpu().clone() for name, tensor in model.state.items()},
        "optimizer_history": [history],
        "task_state": {},
        "extra_state": {TRAINING_KEY: facts},
    }
    write_checkpoint(checkpoint, path)


def read_model(path: Path, read_grown: Callable[[Mapping[str, Any]], GrownLayers]) -> TrainedModel:
    """Read a checkpoint that `write_model` wrote; ``read_grown`` is `ImageSettings.read_grown`.

    Raises:
        AlmaError: the file is missing or damaged, or another command wrote it.
    """
    remedy = f"remove the stage folder {path.parent.parent} to train the stage again"
    checkpoint = read_checkpoint(path, mmap=False, remedy=remedy)
    extra = checkpoint.get("extra_state")
    facts = extra.get(TRAINING_KEY) if isinstance(extra, dict) else None
    if not isinstance(facts, dict):
        raise AlmaError(f"{path}: not written by alma-stream; {remedy}")
    weights = checkpoint["model"]
    is_valid = facts.keys() == _FACTS.keys() and all(isinstance(facts[name], kind) for name, kind in _FACTS.items())
    if not is_valid or not isinstance(weights, dict) or not all(isinstance(each, Tensor) for each in weights.values()):
        raise AlmaError(f"{path}: damaged (entries of an alma-stream checkpoint are missing or invalid); {remedy}")
    try:
        grown = read_grown(facts["grown"])
    except (OmegaConfBaseException, AlmaError) as error:
        raise AlmaError(f"{path}: not the weights of this run's network ({error}); {remedy}") from error
    state = {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items()}
    return TrainedModel(state, grown, facts["num_updates"], facts["num_images"], facts["growth"])


def write_unfinished(path: Path, state: Mapping[str, Any]) -> None:
    """Write the state of an unfinished training."""
    with open_atomically(path) as file:
        torch.save(dict(state), file)


def read_unfinished(path: Path) -> Optional[dict[str, Any]]:
    """Return the state of an unfinished training; None if the file is missing or damaged."""
    if not path.is_file():
        return None
    state = None
    with contextlib.suppress(Exception):  # a damaged file raises errors of many types
        state = load_archive(path, mmap=False)
    if not isinstance(state, dict):
        print_line(f"note: {path}: damaged; the stage is trained from the beginning", sys.stderr)
        return None
    return state


class ModelStore:
    """Mapping from model identifiers to the trained models of a run.

    Args:
        folder: folder of the run.
        settings: settings of the run.
        predicts_with: weights to predict with: ``last``, ``average`` or ``branch``.
    """

    def __init__(self, folder: RunFolder, settings: ImageSettings, predicts_with: str = "last") -> None:
        self.folder, self.settings, self.predicts_with = folder, settings, predicts_with
        self.models: dict[ModelId, TrainedModel] = {}
        self.flops: dict[GrownLayers, NetworkFlops] = {}
        self.built: Optional[tuple[list[ModelId], ImageNetwork]] = None

    def __contains__(self, model: ModelId) -> bool:
        return self.folder.checkpoint(model).is_file()

    def is_complete(self, model: ModelId) -> bool:
        """Return whether the files of a model are complete zip archives."""
        return all(zipfile.is_zipfile(path) for path in (self._tested(model), self.folder.checkpoint(model)))

    def __getitem__(self, model: ModelId) -> TrainedModel:
        """Return a trained model. Raises AlmaError if the checkpoint of the model is missing or damaged."""
        if model in self.models:
            return self.models[model]
        path = self.folder.checkpoint(model)
        remedy = f"remove the stage folder {self.folder.stage_folder(model.stage)} to train the stage again"
        if model not in self:
            raise AlmaError(f"{path}: missing, but required by a later stage; {remedy}")
        trained = read_model(path, self.settings.read_grown)
        try:
            build_network(self.settings, [trained])
        except (KeyError, RuntimeError, AlmaError) as error:
            raise AlmaError(f"{path}: not the weights of this run's network ({error}); {remedy}") from error
        if self.predicts_with != "last":
            trained = replace(trained, tested=read_model(self._tested(model), self.settings.read_grown).state)
        self.models[model] = trained
        return trained

    def __setitem__(self, model: ModelId, trained: TrainedModel) -> None:
        """Add a trained model and write the model's checkpoints."""
        config = self.settings.checkpoint_config(trained.grown)
        if trained.tested is not None:  # written first: the other checkpoint marks the model as complete
            write_model(self._tested(model), trained.predicting, config)
        write_model(self.folder.checkpoint(model), trained, config)
        self.models[model] = trained

    def remove(self, gone: Sequence[ModelId]) -> None:
        """Remove the files of the models ``gone``, and folders that become empty."""
        for model in gone:
            folder = self.folder.model_folder(model)
            for here, names in ((folder / BRANCH, [LAST_CHECKPOINT]), (folder, [LAST_CHECKPOINT, AVERAGE, UNFINISHED])):
                for name in names:
                    (here / name).unlink(missing_ok=True)
                if here.is_dir() and not any(here.iterdir()):
                    here.rmdir()
            self.models.pop(model, None)

    def network_of(self, models: Sequence[ModelId]) -> ImageNetwork:
        """Return one network that predicts with several models. The store keeps the last network in memory."""
        if self.built is None or self.built[0] != [*models]:
            network = build_network(self.settings, [self[model].predicting for model in models])
            self.built = ([*models], network)
        return self.built[1]

    def flops_of(self, grown: GrownLayers) -> NetworkFlops:
        """Return the FLOPs of one model with layer sizes ``grown``, for one image."""
        if grown not in self.flops:
            network = self.settings.build(self.settings.num_joint, grown)
            for parameter in network.parameters():
                torch.nn.init.zeros_(parameter)
            self.flops = {grown: count_flops(network, self.settings.stream.shape)}
        return self.flops[grown]

    def _tested(self, model: ModelId) -> Path:
        return predicting_checkpoint(self.folder, model, self.predicts_with)


def build_network(settings: ImageSettings, models: Sequence[TrainedModel]) -> ImageNetwork:
    """Build a network on the device, with the weights of a joint model, or of models with the same layer sizes."""
    if settings.is_joint:
        network = settings.build(settings.num_joint, models[0].grown)
        network.load_state_dict(dict(models[0].state))
    else:
        network = settings.build(len(models), models[0].grown)
        for state, model in zip(network.member_states(), models, strict=True):
            load_exactly(state, model.state)
    return network.to(settings.device)
