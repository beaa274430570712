"""Trains and tests on images in this process: the back end of ``alma-stream`` for streams of images.

All members that a stage trains are trained side by side in one network, those of runs that differ by their seeds as
well; models that are done stay in memory.
"""

import contextlib
import json
import time
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

import torch
from torch import Tensor

from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.plan import Growth, Model, StagePlan, Training, member_seed
from fairseq_alma.learners.run_display import RunDisplay
from fairseq_alma.learners.run_folder import RunFolder
from fairseq_alma.modules.image_input import ImageInput
from fairseq_alma.modules.image_network import ImageNetwork
from fairseq_alma.modules.vgg import NUM_CONVOLUTIONS, VGG
from fairseq_alma.vision import seeds
from fairseq_alma.vision.firefly_growth import grow_on_images
from fairseq_alma.vision.image_checkpoints import (
    LAST,
    UNFINISHED,
    TrainedModel,
    read_model,
    read_unfinished,
    remove_model,
    write_model,
    write_unfinished,
)
from fairseq_alma.vision.image_settings import ImageSettings
from fairseq_alma.vision.mixture_growth import split_losing_experts
from fairseq_alma.vision.network_flops import NetworkFlops, count_flops
from fairseq_alma.vision.predictions import Predictions
from fairseq_alma.vision.stage_images import TrainingImages, bootstrap
from fairseq_alma.vision.stage_training import StageTraining

SAVE_EVERY_SECONDS = 20.0
SEEDS = "seeds"
"""Key in the file of an unfinished training: the seeds of what is trained."""
GROWTH_FLOPS = "growth_flops"  # in stage.json: the part of train_flops that Firefly's growth step took


class ImageBackend:
    """The back end of ``alma-stream`` for streams of images; see `loop.Backend`.

    Args:
        settings: of the run.
        folder: the run.
        display: shows what is done.
        num_stages: of the run; the last one leaves what a picture of its experts needs.

    Attributes:
        companions: back ends and plans of runs that go through the same stages in step with this one; whichever
            trains first trains for all of them.
    """

    def __init__(self, settings: ImageSettings, folder: RunFolder, display: RunDisplay, num_stages: int) -> None:
        self.settings, self.folder, self.display, self.num_stages = settings, folder, display, num_stages
        stream = settings.stream
        self.stream: ImageStream = stream
        self.source = ImageInput(stream.mean, stream.std, stream.augment).to(settings.device)
        self.models: dict[Model, TrainedModel] = {}
        self.flops: dict[str, NetworkFlops] = {}
        self.kept: Optional[set[Model]] = None
        self.companions: Sequence[tuple[ImageBackend, Sequence[StagePlan]]] = ()
        self.built: Optional[tuple[list[Model], ImageNetwork]] = None
        test = stream.test_indices()
        self.predictions = Predictions(self._images(test), self._labels(test))

    def train(self, plan: StagePlan, lock: int) -> Mapping[str, Any]:
        """Train all models of the stage side by side; see `loop.Backend`."""
        trained = [self._find(training.model) for training in plan.trainings]
        if any(model is None for model in trained):
            self._train_together(plan)
        models = [self._model(training.model) for training in plan.trainings]
        return {
            "num_updates": max(model.num_updates for model in models),
            "train_images": sum(model.num_images for model in models),
            "train_flops": sum(
                model.num_images * self._flops(model.grown).train + model.growth.get(GROWTH_FLOPS, 0)
                for model in models
            ),
        }

    def train_member(self, plan: StagePlan, training: Training, locks: Sequence[int]) -> Any:
        """Refuse: members of image models are trained side by side."""
        raise AlmaError("--member: alma-stream trains the members on images side by side; leave the option out")

    def is_trained(self, model: Model) -> bool:
        """Tell whether a model is trained to its end; see `loop.Backend`."""
        return self._path(model).is_file()

    def test(self, plan: StagePlan, lock: int) -> Mapping[str, Any]:
        """Test what predicts after the stage; see `loop.Backend`."""
        valid = self.stream.valid_indices(plan.stage.megabatches)
        images, labels = self._images(valid), self._labels(valid)
        models = [self._model(model) for model in plan.predictors]
        network_of = self._network_of
        figures: dict[str, Any] = {
            "num_params": sum(_num_params(model.state) for model in models),
            "num_experts": max(model.grown.get("num_experts", self._num_experts) for model in models),
            "num_members": self.settings.num_joint * len(models),
            "test_flops_per_image": sum(self._flops(model.grown).test for model in models),
            "valid": self.predictions.on_valid(plan, network_of, self.settings.is_joint, images, labels),
            "test": self.predictions.on_test(plan, network_of, self.settings.is_joint),
        }
        for model in models[-len(plan.trainings) :]:
            figures.update(model.growth)
            if "gate_trees" in model.grown:
                figures["gate_trees"] = json.loads(model.grown["gate_trees"] or "null")
                figures["expert_usage"] = self.predictions.usage
        if plan.stage.index == self.num_stages - 1:
            self.predictions.write_experts(self.folder.stage_folder(plan.stage.index))
        return figures

    def keep_only(self, stage: int, needed: Sequence[Model]) -> None:
        """Remove the weights that no later stage needs; see `loop.Backend`."""
        if self.kept is None:
            folders = self.folder.root.glob("stage-*/member-*")
            self.kept = {Model(_number(folder.parent), _number(folder)) for folder in folders}
        gone = {model for model in self.kept | self.models.keys() if model.stage <= stage} - set(needed)
        for model in gone:
            remove_model(self.folder.model_folder(model))
            self.models.pop(model, None)
        self.kept = {*needed}

    def _train_together(self, plan: StagePlan) -> None:
        """Train a stage of this run and of all companions that have not completed theirs."""
        stage = plan.stage.index
        group = [(self, training) for training in plan.trainings]
        with contextlib.ExitStack() as locks:
            clocks = []
            for companion, plans in self.companions:
                if companion.folder.read_stage(stage) is None:
                    locks.enter_context(companion.folder.lock_stage(stage))
                    group += [(companion, training) for training in plans[stage].trainings]
                    clocks.append(companion.folder.start_clock(stage, plans[stage].trainings[0].model.member))
            self._train_stage(plan, group)
            for clock in clocks:
                clock.stop()

    def _train_stage(self, plan: StagePlan, group: "Sequence[tuple[ImageBackend, Training]]") -> None:
        """Train the network of a stage, from its beginning or from where it was cut off.

        Args:
            plan: of this run.
            group: what is trained, and for which run.
        """
        train, valid = (self.stream.train_indices, self.stream.valid_indices)
        rows, held_out = train(plan.stage.megabatches), valid(plan.stage.megabatches)
        valid_images, valid_labels = self._images(held_out), self._labels(held_out)
        network, grown, growth = self._starting_network(plan, group, valid_images, valid_labels)
        data = TrainingImages.of(
            self._bytes(rows),
            self._labels(rows),
            [self._bootstrap(training, plan, len(rows)) for _, training in group],
            self.source,
        )
        orders = [seeds.seeded(training.seed, plan.stage.index, seeds.ORDER) for _, training in group]
        training = StageTraining(network, data, valid_images, valid_labels, self.settings.training(), orders)
        self._run(plan, training, [each.seed for _, each in group])
        training.finish()
        # Own models last: while one of them is missing, all are trained again from the same file, to the same bits.
        for unit, (backend, each) in reversed([*enumerate(group)]):
            epochs = training.epochs_of(unit)
            num_updates, num_images = epochs * training.updates_per_epoch, epochs * data.num_images
            model = TrainedModel(training.states[unit], grown, num_updates, num_images, growth)
            write_model(backend._path(each.model), model, self.settings.checkpoint_config(grown))
            backend.models[each.model] = model
        (self.folder.model_folder(plan.trainings[0].model) / UNFINISHED).unlink(missing_ok=True)

    def _run(self, plan: StagePlan, training: StageTraining, of_seeds: list[int]) -> None:
        """Run all epochs, and save now and then what it takes to go on."""
        unfinished = self.folder.model_folder(plan.trainings[0].model) / UNFINISHED
        before = read_unfinished(unfinished)
        if before is not None and before.pop(SEEDS) == of_seeds:  # else it is that of other runs side by side
            training.load_state_dict(before)
        per_epoch, num_images = training.updates_per_epoch, training.data.num_images * len(of_seeds)
        saved = began = time.monotonic()
        done = training.epoch
        max_update = training.settings.max_epoch * per_epoch
        with self.display.training(plan, None, max_update, training.epoch * per_epoch) as progress:
            while not training.is_over:
                loss = training.run_epoch()
                now = time.monotonic()
                rate = (training.epoch - done) * num_images / max(now - began, 1e-9)
                progress.update(training.epoch * per_epoch, loss, rate)
                if now - saved >= SAVE_EVERY_SECONDS and not training.is_over:
                    write_unfinished(unfinished, {**training.state_dict(), SEEDS: of_seeds})
                    saved = time.monotonic()

    def _starting_network(
        self,
        plan: StagePlan,
        group: "Sequence[tuple[ImageBackend, Training]]",
        valid_images: Tensor,
        valid_labels: Tensor,
    ) -> tuple[ImageNetwork, dict[str, Any], dict[str, Any]]:
        """Return the network with the weights that the stage starts from, grown if it grows.

        Returns:
            The network; the options that growth has changed up to now; the figures of this growth step.
        """
        start = plan.trainings[0].start
        num_members = self.settings.num_joint if self.settings.is_joint else len(group)
        if start is None:
            network = self.settings.build(num_members)
            network.reset_parameters([seeds.seeded(seed, seeds.INITIAL_WEIGHTS) for seed in self._initial_seeds(group)])
            return network.to(self.settings.device), self.settings.options_of(network), {}
        before = self._model(start)
        network = self.settings.build(num_members, before.grown)
        if self.settings.is_joint:
            network.load_state_dict(dict(before.state))
        else:
            for member, (backend, training) in enumerate(group):
                assert training.start is not None
                network.load_member_state(member, backend._model(training.start).state)
        network = network.to(self.settings.device)
        growth = plan.trainings[0].growth
        if growth is None:
            return network, dict(before.grown), {}
        measure = lambda grown: self.predictions.measure(grown, valid_images, valid_labels)  # noqa: E731
        before_growth = {"valid": measure(network)}
        network, cost = self._grow(network, growth, plan, valid_images, valid_labels)
        figures = {"before_growth": before_growth, "after_growth": {"valid": measure(network)}, **cost}
        return network, self.settings.options_of(network), figures

    def _grow(
        self, network: ImageNetwork, growth: Growth, plan: StagePlan, valid_images: Tensor, valid_labels: Tensor
    ) -> tuple[ImageNetwork, dict[str, int]]:
        """Carry out a growth step. Returns the network, and what stage.json says of the step's cost."""
        generator = seeds.seeded(growth.seed, plan.stage.index, seeds.GROWTH)
        if growth.method == "split":
            for _ in range(growth.num_new):
                split_losing_experts(network, valid_images, valid_labels, generator)
            return network, {}
        assert isinstance(network, VGG)  # the learner needs alma_firefly_vgg
        rows = self.stream.train_indices(plan.stage.megabatches)
        network, flops = grow_on_images(
            network,
            self._images(rows),
            self._labels(rows),
            self.settings.training().batch_size,
            [self.settings.cfg.model.channels] * NUM_CONVOLUTIONS,
            growth.share,
            generator,
        )
        return network, {GROWTH_FLOPS: flops}

    def _initial_seeds(self, group: "Sequence[tuple[ImageBackend, Training]]") -> list[int]:
        seeds_of_group = [training.seed for _, training in group]
        if self.settings.is_joint:
            return [member_seed(seeds_of_group[0], member) for member in range(self.settings.num_joint)]
        return seeds_of_group

    def _bootstrap(self, training: Training, plan: StagePlan, num_images: int) -> Optional[Tensor]:
        if not training.bootstrap:
            return None
        return bootstrap(num_images, seeds.seeded(training.seed, plan.stage.index, seeds.BOOTSTRAP))

    def _network_of(self, models: Sequence[Model]) -> ImageNetwork:
        """Build the network of trained models side by side, unless it is the one that was asked for last."""
        if self.built is None or self.built[0] != [*models]:
            self.built = ([*models], self._build(models))
        return self.built[1]

    def _build(self, models: Sequence[Model]) -> ImageNetwork:
        trained = [self._model(model) for model in models]
        if self.settings.is_joint:
            network = self.settings.build(self.settings.num_joint, trained[0].grown)
            network.load_state_dict(dict(trained[0].state))
        else:
            network = self.settings.build(len(models), trained[0].grown)
            for member, model in enumerate(trained):
                network.load_member_state(member, model.state)
        return network.to(self.settings.device)

    def _model(self, model: Model) -> TrainedModel:
        found = self._find(model)
        if found is None:
            raise AlmaError(
                f"{self._path(model)}: not there, but a later stage needs it; remove "
                f"{self.folder.stage_folder(model.stage)} to train that stage again"
            )
        return found

    def _find(self, model: Model) -> Optional[TrainedModel]:
        if model not in self.models and self._path(model).is_file():
            self.models[model] = read_model(self._path(model))
        return self.models.get(model)

    def _flops(self, grown: Mapping[str, Any]) -> NetworkFlops:
        """Return the operations of one model."""
        key = json.dumps(grown, sort_keys=True)
        if key not in self.flops:
            network = self.settings.build(self.settings.num_joint, grown)
            for parameter in network.parameters():
                torch.nn.init.zeros_(parameter)
            self.flops = {key: count_flops(network, self.stream.shape)}
        return self.flops[key]

    @property
    def _num_experts(self) -> int:
        return self.settings.cfg.model.get("num_experts", 1)

    def _path(self, model: Model) -> Path:
        return self.folder.model_folder(model) / LAST

    def _bytes(self, rows: Any) -> Tensor:
        return torch.from_numpy(self.stream.images[rows]).to(self.settings.device)

    def _images(self, rows: Any) -> Tensor:
        return self.source.normalised(self._bytes(rows))

    def _labels(self, rows: Any) -> Tensor:
        return torch.from_numpy(self.stream.labels[rows]).to(self.settings.device)


def _num_params(state: Mapping[str, Tensor]) -> int:
    """Count parameters; what batch norm measures is none."""
    return sum(tensor.numel() for name, tensor in state.items() if not name.rpartition(".")[2].startswith("running_"))


def _number(folder: Path) -> int:
    """``stage-012`` and ``member-012`` are 12."""
    return int(folder.name.rpartition("-")[2])
