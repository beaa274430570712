"""Trains and tests on images in this process: the back end of ``alma-stream`` for streams of images.

All members that a stage trains are trained side by side in one network, those of runs that differ by their seeds as
well; models that are done stay in memory.
"""

import contextlib
import time
from functools import partial
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

import torch
from torch import Tensor

from fairseq_alma.backends.images import seeds
from fairseq_alma.backends.images.image_checkpoints import UNFINISHED, TrainedModel, read_unfinished, write_unfinished
from fairseq_alma.backends.images.image_settings import ImageSettings
from fairseq_alma.backends.images.model_store import ModelStore
from fairseq_alma.backends.images.predictions import Predictions
from fairseq_alma.backends.images.stage_images import TrainingImages, bootstrap
from fairseq_alma.backends.images.stage_start import GROWTH_FLOPS, Examples, Group, start_stage
from fairseq_alma.backends.images.stage_training import StageTraining
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import nested_gate_trees
from fairseq_alma.learners.plan import Model, StagePlan, Training
from fairseq_alma.modules.images.image_input import ImageInput
from fairseq_alma.runs.run_display import RunDisplay
from fairseq_alma.runs.run_folder import RunFolder

SAVE_EVERY_SECONDS = 20.0
SEEDS = "seeds"
"""Key in the file of an unfinished training: the seeds of what is trained."""


class ImageBackend:
    """The back end of ``alma-stream`` for streams of images; see `loop.Backend`.

    Args:
        settings: of the run.
        folder: the run.
        display: shows what is done.
        num_stages: of the run; the last one leaves what a picture of its experts needs.

    Attributes:
        companions: models and plans of runs that go through the same stages in step with this one; whichever trains
            first trains for all of them.
    """

    def __init__(self, settings: ImageSettings, folder: RunFolder, display: RunDisplay, num_stages: int) -> None:
        self.settings, self.folder, self.display, self.num_stages = settings, folder, display, num_stages
        self.stream = settings.stream
        self.source = ImageInput(self.stream.mean, self.stream.std, self.stream.augment).to(settings.device)
        self.models = ModelStore(folder, settings)
        self.companions: Sequence[tuple[ModelStore, Sequence[StagePlan]]] = ()
        self.predictions = Predictions(*self._examples(self.stream.test_indices()))

    def train(self, plan: StagePlan, lock: int) -> Mapping[str, Any]:
        """Train all models of the stage side by side; see `loop.Backend`."""
        if any(training.model not in self.models for training in plan.trainings):
            self._train_together(plan)
        models = [self.models[training.model] for training in plan.trainings]
        flops_of = self.models.flops_of
        return {
            "num_updates": max(model.num_updates for model in models),
            "train_images": sum(model.num_images for model in models),
            "train_flops": sum(
                model.num_images * flops_of(model.grown).train + model.growth.get(GROWTH_FLOPS, 0) for model in models
            ),
        }

    def train_member(self, plan: StagePlan, training: Training, locks: Sequence[int]) -> Any:
        """Refuse: members of image models are trained side by side."""
        raise AlmaError("--member: alma-stream trains the members on images side by side; leave the option out")

    def is_trained(self, model: Model) -> bool:
        """Tell whether a model is trained to its end; see `loop.Backend`."""
        return model in self.models

    def test(self, plan: StagePlan, lock: int) -> Mapping[str, Any]:
        """Test what predicts after the stage; see `loop.Backend`."""
        valid = self._examples(self.stream.valid_indices(plan.stage.megabatches))
        models = [self.models[model] for model in plan.predictors]
        network_of, is_joint = self.models.network_of, self.settings.is_joint
        figures: dict[str, Any] = {
            "num_params": sum(_num_params(model.state) for model in models),
            "num_experts": max(model.grown.num_experts for model in models),
            "num_members": self.settings.num_joint * len(models),
            "test_flops_per_image": sum(self.models.flops_of(model.grown).test for model in models),
            "valid": self.predictions.on_valid(plan, network_of, is_joint, *valid),
            "test": self.predictions.on_test(plan, network_of, is_joint),
        }
        for model in models[-len(plan.trainings) :]:
            figures.update(model.growth)
            if model.grown.trees:
                figures["gate_trees"] = nested_gate_trees(model.grown.trees)
                figures["expert_usage"] = self.predictions.usage
        if plan.stage.index == self.num_stages - 1:
            self.predictions.write_experts(self.folder.stage_folder(plan.stage.index))
        return figures

    def keep_only(self, stage: int, needed: Sequence[Model]) -> None:
        """Remove the weights that no later stage needs; see `loop.Backend`."""
        self.models.keep_only(stage, needed)

    def _train_together(self, plan: StagePlan) -> None:
        """Train a stage of this run and of all companions that have not completed theirs."""
        stage = plan.stage.index
        group = [(self.models, training) for training in plan.trainings]
        with contextlib.ExitStack() as locks:
            clocks = []
            for models, plans in self.companions:
                if models.folder.read_stage(stage) is None:
                    locks.enter_context(models.folder.lock_stage(stage))
                    group += [(models, training) for training in plans[stage].trainings]
                    clocks.append(models.folder.start_clock(stage, plans[stage].trainings[0].model.member))
            self._train_stage(plan, group)
            for clock in clocks:
                clock.stop()

    def _train_stage(self, plan: StagePlan, group: Group) -> None:
        """Train the network of a stage, from its beginning or from where it was cut off.

        Args:
            plan: of this run.
            group: what is trained, this run's first.
        """
        rows = self.stream.train_indices(plan.stage.megabatches)
        valid = self._examples(self.stream.valid_indices(plan.stage.megabatches))
        measure = partial(self.predictions.measure, images=valid[0], labels=valid[1])
        start = start_stage(plan, group, self.settings, lambda: self._examples(rows), valid, measure)
        bootstraps = [_bootstrap(training, plan, len(rows)) for _, training in group]
        data = TrainingImages.of(self._bytes(rows), self._labels(rows), bootstraps, self.source)
        orders = [seeds.seeded(training.seed, plan.stage.index, seeds.ORDER) for _, training in group]
        training = StageTraining(start.network, data, *valid, self.settings.training(), orders)
        unfinished = self.folder.model_folder(plan.trainings[0].model) / UNFINISHED
        self._run(plan, training, unfinished, [each.seed for _, each in group])
        training.finish()
        # Own models last: while one of them is missing, all are trained again from the same file, to the same bits.
        for unit, (models, each) in reversed([*enumerate(group)]):
            epochs = training.epochs_of(unit)
            num_updates, num_images = epochs * training.updates_per_epoch, epochs * data.num_images
            models[each.model] = TrainedModel(training.states[unit], start.grown, num_updates, num_images, start.growth)
        unfinished.unlink(missing_ok=True)

    def _run(self, plan: StagePlan, training: StageTraining, unfinished: Path, of_seeds: list[int]) -> None:
        """Run all epochs, and save now and then what it takes to go on."""
        before = read_unfinished(unfinished)
        if before is not None and before.get(SEEDS) == of_seeds:  # else it is that of other runs side by side
            _go_on(training, before, unfinished)
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

    def _examples(self, rows: Any) -> Examples:
        return self.source.normalised(self._bytes(rows)), self._labels(rows)

    def _bytes(self, rows: Any) -> Tensor:
        return torch.from_numpy(self.stream.images[rows]).to(self.settings.device)

    def _labels(self, rows: Any) -> Tensor:
        return torch.from_numpy(self.stream.labels[rows]).to(self.settings.device)


def _go_on(training: StageTraining, before: Mapping[str, Any], path: Path) -> None:
    """Go on from where a training was cut off. Raises AlmaError if the file is not of this training."""
    try:
        training.load_state_dict(before)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise AlmaError(
            f"{path}: not of this training ({error}); remove it to train the stage from its beginning"
        ) from error


def _bootstrap(training: Training, plan: StagePlan, num_images: int) -> Optional[Tensor]:
    if not training.bootstrap:
        return None
    return bootstrap(num_images, seeds.seeded(training.seed, plan.stage.index, seeds.BOOTSTRAP))


def _num_params(state: Mapping[str, Tensor]) -> int:
    """Count parameters; what batch norm measures is none."""
    return sum(tensor.numel() for name, tensor in state.items() if not name.rpartition(".")[2].startswith("running_"))
