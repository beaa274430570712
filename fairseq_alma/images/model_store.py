"""The trained models of a run: on disk, where a restart finds them, and in memory for the next stage."""

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Optional, Sequence

import torch

from fairseq_alma.errors import AlmaError
from fairseq_alma.images.image_checkpoints import (
    AVERAGE,
    TrainedModel,
    read_model,
    remove_model,
    write_model,
)
from fairseq_alma.images.image_classifier import GrownLayers
from fairseq_alma.images.image_network import ImageNetwork
from fairseq_alma.images.image_settings import ImageSettings
from fairseq_alma.images.network_flops import NetworkFlops, count_flops
from fairseq_alma.learners.plan import ModelId
from fairseq_alma.runs.run_folder import RunFolder


class ModelStore:
    """Trained models.

    Args:
        folder: the run.
        settings: of the run.
        has_averages: whether each model has an average beside its weights.
    """

    def __init__(self, folder: RunFolder, settings: ImageSettings, has_averages: bool = False) -> None:
        self.folder, self.settings, self.has_averages = folder, settings, has_averages
        self.models: dict[ModelId, TrainedModel] = {}
        self.flops: dict[GrownLayers, NetworkFlops] = {}
        self.kept: Optional[set[ModelId]] = None
        self.built: Optional[tuple[list[ModelId], ImageNetwork]] = None

    def __contains__(self, model: ModelId) -> bool:
        """Tell whether a model is trained to its end."""
        return self._path(model).is_file()

    def is_whole(self, model: ModelId) -> bool:
        """Tell whether a model's file has its end: what torch saves is a zip file, its directory stands last."""
        has_average = not self.has_averages or zipfile.is_zipfile(self._average(model))
        return has_average and zipfile.is_zipfile(self._path(model))

    def __getitem__(self, model: ModelId) -> TrainedModel:
        """Return a model. Raises AlmaError if it is gone."""
        if model not in self.models:
            if model not in self:
                raise AlmaError(
                    f"{self._path(model)}: not there, but a later stage needs it; remove "
                    f"{self.folder.stage_folder(model.stage)} to train that stage again"
                )
            self.models[model] = self._read(model)
        return self.models[model]

    def __setitem__(self, model: ModelId, trained: TrainedModel) -> None:
        """Take in a model, and write its checkpoint."""
        self.folder.require_in_place()
        config = self.settings.checkpoint_config(trained.grown)
        if trained.average is not None:  # first, as a model is there when its last checkpoint is
            write_model(self._average(model), trained.predicting, config)
        write_model(self._path(model), trained, config)
        self.models[model] = trained

    def keep_only(self, stage: int, needed: Sequence[ModelId]) -> None:
        """Remove the models of the stages up to ``stage``, except what ``needed`` names."""
        if self.kept is None:
            self.kept = {model for each in self.folder.stages() for model in self.folder.members(each)}
        gone = {model for model in self.kept | self.models.keys() if model.stage <= stage} - set(needed)
        for model in gone:
            remove_model(self.folder.model_folder(model))
            self.models.pop(model, None)
        self.kept = {*needed}

    def network_of(self, models: Sequence[ModelId]) -> ImageNetwork:
        """Build the network by which models predict, side by side, unless it is the one that was asked for last."""
        if self.built is None or self.built[0] != [*models]:
            network = build_network(self.settings, [self[model].predicting for model in models])
            self.built = ([*models], network)
        return self.built[1]

    def flops_of(self, grown: GrownLayers) -> NetworkFlops:
        """Return the operations of one model that has grown so."""
        if grown not in self.flops:
            network = self.settings.build(self.settings.num_joint, grown)
            for parameter in network.parameters():
                torch.nn.init.zeros_(parameter)
            self.flops = {grown: count_flops(network, self.settings.stream.shape)}
        return self.flops[grown]

    def _read(self, model: ModelId) -> TrainedModel:
        """Read a checkpoint. Raises AlmaError if its weights are not those of this run's network."""
        trained = read_model(self._path(model), self.settings.read_grown)
        try:
            build_network(self.settings, [trained])
        except (KeyError, RuntimeError, AlmaError) as error:
            raise AlmaError(
                f"{self._path(model)}: not the weights of this run's network ({error}); remove "
                f"{self.folder.stage_folder(model.stage)} to train that stage again"
            ) from error
        if not self.has_averages:
            return trained
        average = read_model(self._average(model), self.settings.read_grown)
        return replace(trained, average=average.state)

    def _average(self, model: ModelId) -> Path:
        return self.folder.model_folder(model) / AVERAGE

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
