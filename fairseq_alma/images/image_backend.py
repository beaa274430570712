"""Trains and tests on images in this process: the back end of ``alma-stream`` for streams of images.

All members that a stage trains are trained side by side in one network, those of runs that differ by their seeds as
well; models that are done stay in memory.
"""

import time
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Collection, Mapping, Optional, Sequence

import torch
from torch import Generator, Tensor

from fairseq_alma.errors import AlmaError
from fairseq_alma.files import write_together
from fairseq_alma.growth.gate_tree import nested_gate_trees
from fairseq_alma.images.first_weights import GROWTH_FLOPS, Group, start_stage
from fairseq_alma.images.image_network import ImageNetwork, member_states
from fairseq_alma.images.image_settings import ImageSettings
from fairseq_alma.images.model_store import (
    UNFINISHED,
    ModelStore,
    TrainedModel,
    build_network,
    read_unfinished,
    remove_unfinished,
    write_unfinished,
)
from fairseq_alma.images.predictions import Examples, Predictions, write_experts
from fairseq_alma.images.stage_average import average_of, measure_batch_norm, share_of_new
from fairseq_alma.images.stage_images import (
    BOOTSTRAP,
    ORDER,
    ImageInput,
    TrainingImages,
    batch_sizes,
    bootstrap,
    seeded,
)
from fairseq_alma.images.stage_training import StageTraining
from fairseq_alma.learners.plan import ModelId, StagePlan, Training
from fairseq_alma.learners.schedule import Stage
from fairseq_alma.runs.loop import Run
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.runs.steps import StageWork, Step
from fairseq_alma.training.branch import LRBranch
from fairseq_alma.training.feature import Features, Part
from fairseq_alma.training.stage_ends import StageEnds

SAVE_EVERY_SECONDS = 20.0
SEEDS = "seeds"
"""Key in the file of an unfinished training: the seeds of what is trained."""


class RunModels:
    """Models and predictions of one run.

    Args:
        run: the run.
        settings: of all runs.
        test: examples of the test set.
        predicts_with: see `Features.predicts_with`.
    """

    def __init__(self, run: Run, settings: ImageSettings, test: Examples, predicts_with: str) -> None:
        self.store = ModelStore(run.folder, settings, predicts_with)
        joint_logits = settings.joint_logits if settings.is_joint else None
        self.predictions = Predictions(test, self.store.network_of, joint_logits)
        self.last_stage = len(run.plans) - 1


class ImageBackend:
    """The back end of ``alma-stream`` for streams of images; see `steps.Backend`.

    Args:
        settings: of the runs, which differ by their seeds alone.
        runs: that go through the same stages in step.
        shared_folder: where several runs keep the training that they share.
        group_size: train so many members of a stage in a network of their own; their last digits do not depend on the
            others then. None: train all of them in one.
        keep_maps: leave which experts test images go to after every stage, not after the last one alone.
        features: what trainings do beside learning, what predicts after a stage, and what the next one begins with.
    """

    def __init__(
        self,
        settings: ImageSettings,
        runs: Sequence[Run],
        shared_folder: Path,
        group_size: Optional[int] = None,
        keep_maps: bool = False,
        features: Optional[Features] = None,
    ) -> None:
        self.settings, self.shared_folder = settings, shared_folder
        self.group_size, self.keep_maps, self.features = group_size, keep_maps, features or Features()
        self.ends, self.branch = self.features[StageEnds], self.features[LRBranch]
        self.stream = settings.stream
        self.source = ImageInput(self.stream.mean, self.stream.std, self.stream.augment).to(settings.device)
        how = (settings, self._test_examples, self.features.predicts_with)
        self.models = {run.folder.root: RunModels(run, *how) for run in runs}

    def steps(self, folder: RunFolder, plan: StagePlan) -> list["ImageStep"]:
        """Return the steps of a stage: its models are trained side by side, or in groups; see `steps.Backend`."""
        groups = [plan.trainings] if self.group_size is None else plan.groups(self.group_size)
        return [*(TrainImages(self, folder, tuple(group)) for group in groups), TestImages(self, folder)]

    def train(self, work: StageWork, group: tuple[Training, ...]) -> Mapping[str, Any]:
        """Train some models of a stage, or all with those of the runs in step, unless they are there."""
        own = replace(work, plan=replace(work.plan, trainings=group))
        self._train_together([own] if self.group_size is not None else (work.beside or [own]))
        return self._cost(own)

    def _train_together(self, works: Sequence[StageWork]) -> None:
        """Train all models of the same stage of some runs in one network, unless they are there."""
        group = [(self._store(work.folder), training) for work in works for training in work.plan.trainings]
        if any(training.model not in store for store, training in group):
            self._train_stage(works, group)
        # While one of them is missing, all are trained again from the same file, to the same bits.
        remove_unfinished(self._unfinished(works))

    def _cost(self, work: StageWork) -> Mapping[str, Any]:
        store = self._store(work.folder)
        models = [store[training.model] for training in work.plan.trainings]
        return {
            "num_updates": max(model.num_updates for model in models),
            "train_images": sum(model.num_images for model in models),
            "train_flops": sum(
                model.num_images * store.flops_of(model.grown).train + model.growth.get(GROWTH_FLOPS, 0)
                for model in models
            ),
            **self._describe(work.plan.stage),
        }

    def _describe(self, stage: Stage) -> dict[str, Any]:
        """Return what stage.json says of features; nothing for the paper's way."""
        if not self.features.record():
            return {}
        described: dict[str, Any] = {"predicts_with": self.features.predicts_with}
        if self.branch.branch_decay is not None:
            num_images = len(self.stream.train_indices(stage.megabatches))
            described["branch_updates"] = self.branch.num_updates(self._updates_of(num_images))
        average = self.ends.stage_average
        if average is not None:
            described["newest_share"] = share_of_new(stage.index, average)
        if stage.index and self.ends.shrink_perturb is not None:
            described["kept_share"] = self.ends.shrink_perturb
        return {"anytime": described}

    def is_there(self, folder: RunFolder, model: ModelId) -> bool:
        """Tell whether a model's checkpoint is there, whole."""
        return self._store(folder).is_whole(model)

    def test(self, work: StageWork) -> Mapping[str, Any]:
        """Test what predicts after the stage."""
        plan, run = work.plan, self.models[work.folder.root]
        store = run.store
        valid = run.predictions.on_valid(plan, self._examples(self.stream.valid_indices(plan.stage.megabatches)))
        test, usage = run.predictions.on_test(plan)
        models = [store[model] for model in plan.predictors]
        figures: dict[str, Any] = {
            "num_params": sum(_num_params(model.state) for model in models),
            "num_experts": max(model.grown.num_experts for model in models),
            "num_members": self.settings.num_joint * len(models),
            "test_flops_per_image": sum(store.flops_of(model.grown).test for model in models),
            "valid": valid,
            "test": test,
        }
        trained = len(plan.trainings)
        for model in models[-trained:]:
            figures.update(model.growth)
            if model.grown.trees:
                figures["gate_trees"] = nested_gate_trees(model.grown.trees)
                figures["expert_usage"] = usage
        if self.keep_maps or plan.stage.index == run.last_stage:
            network = store.network_of(plan.predictors[-trained:])
            write_experts(work.folder.stage_folder(plan.stage.index), network, self._test_examples)
        return figures

    def keep_only(self, folder: RunFolder, stage: int, needed: Sequence[ModelId], planned: Collection[ModelId]) -> None:
        """Remove the weights that no later stage needs; see `steps.Backend`."""
        self._store(folder).keep_only(stage, needed, planned)

    def _train_stage(self, works: Sequence[StageWork], group: Group) -> None:
        """Train the network of a stage, from its beginning or from where it was cut off.

        Args:
            works: of all runs.
            group: what is trained for them, each with the models of its run.
        """
        plan = works[0].plan
        rows = self.stream.train_indices(plan.stage.megabatches)
        valid = self._examples(self.stream.valid_indices(plan.stage.megabatches))
        start = start_stage(plan, group, self.settings, lambda: self._examples(rows), valid, self.ends.shrink_perturb)
        bootstraps = [_bootstrap(training, plan, len(rows)) for _, training in group]
        data = TrainingImages.of(self._bytes(rows), self._labels(rows), bootstraps, self.source)
        orders = [seeded(training.seed, plan.stage.index, ORDER) for _, training in group]
        training = self._training(start.network, data, valid, orders)
        self._run(works, training, [each.seed for _, each in group])
        training.finish()
        tested = self._tested(group, plan.stage.index, training, rows)
        of_copy = self._images_of_copy(data)

        def keep(unit: int) -> None:
            store, each = group[unit]
            epochs = training.epochs_of(unit)
            counts = (epochs * training.updates_per_epoch, epochs * data.num_images + of_copy)
            store[each.model] = TrainedModel(training.states[unit], start.grown, *counts, start.growth, tested[unit])

        write_together([partial(keep, unit) for unit in range(len(group))])

    def _updates_of(self, num_images: int) -> int:
        """Return the updates of a stage that no early stop ends."""
        how = self.settings.training()
        return how.max_epoch * len(batch_sizes(num_images, how.batch_size))

    def _training(
        self, network: ImageNetwork, data: TrainingImages, valid: Examples, orders: list[Generator]
    ) -> StageTraining:
        """Return the training of a stage, with what it does beside learning, and with its copy, if one branches off."""
        whole = self._updates_of(data.num_images)
        training, copy = (self.features.for_part(Part(0, whole, is_branch)) for is_branch in (False, True))
        own = (copy, whole - self.branch.num_updates(whole)) if self.branch.copies else ()
        return StageTraining(network, data, *valid, self.settings.training(), orders, training, *own)

    def _images_of_copy(self, data: TrainingImages) -> int:
        """Return the images that the copy of a training is trained on from where it differs."""
        if not self.branch.copies:
            return 0
        whole, how = self._updates_of(data.num_images), self.settings.training()
        epochs, updates = divmod(whole - self.branch.num_updates(whole), len(data.sizes(how.batch_size)))
        return (how.max_epoch - epochs) * data.num_images - sum(data.sizes(how.batch_size)[:updates])

    def _tested(
        self, group: Group, stage: int, training: StageTraining, rows: Any
    ) -> Sequence[Optional[Mapping[str, Tensor]]]:
        """Return what is tested of each unit: an average, with batch norm measured on the stage's images, or a copy."""
        how = self.ends.stage_average
        if how is not None:
            share = share_of_new(stage, how)
            pairs = zip(group, training.states, strict=True)
            tested = [
                average_of(None if each.start is None else store[each.start].tested, state, share)
                for (store, each), state in pairs
            ]
            return self._measured(tested, training, rows) if stage else tested
        if self.features.predicts_with == "average":
            return self._measured([each for each in training.tested if each is not None], training, rows)
        return training.tested

    def _measured(
        self, averages: Sequence[Mapping[str, Tensor]], training: StageTraining, rows: Any
    ) -> list[Mapping[str, Tensor]]:
        """Return averages with what batch norm measures of the stage's images."""
        trained = [TrainedModel(state, self.settings.grown_layers(training.network), 0, 0) for state in averages]
        network = build_network(self.settings, trained)
        measure_batch_norm(network, self._examples(rows)[0].split(training.data.sizes(training.settings.batch_size)))
        states = [network.state_dict()] if self.settings.is_joint else member_states(network)
        return [{name: tensor.clone() for name, tensor in state.items()} for state in states]

    def _unfinished(self, works: Sequence[StageWork]) -> Path:
        """Return where a training that is cut off is resumed from."""
        plan = works[0].plan
        if len(works) == 1:
            return works[0].folder.model_folder(plan.trainings[0].model) / UNFINISHED
        # Runs of other seeds may be trained from the same folder at the same time, those of the same may not.
        return self.shared_folder / f"stage-{plan.stage.index:03d}-{works[0].folder.name}-{UNFINISHED}"

    def _run(self, works: Sequence[StageWork], training: StageTraining, of_seeds: list[int]) -> None:
        """Run all epochs, and save now and then what it takes to resume."""
        work, unfinished = works[0], self._unfinished(works)
        before = read_unfinished(unfinished)
        if before is not None and before.get(SEEDS) == of_seeds:  # else it is that of other runs side by side
            _resume(training, before, unfinished)
        per_epoch, num_images = training.updates_per_epoch, training.data.num_images * len(of_seeds)
        saved = began = time.monotonic()
        done, of_all = training.num_epochs
        with work.display.training(work.plan, None, of_all * per_epoch, done * per_epoch) as progress:
            while not training.is_over:
                loss = training.run_epoch()
                now = time.monotonic()
                epochs, _ = training.num_epochs
                rate = (epochs - done) * num_images / max(now - began, 1e-9)
                progress.update(epochs * per_epoch, loss, rate)
                if now - saved >= SAVE_EVERY_SECONDS and not training.is_over:
                    work.folder.require_in_place()
                    write_unfinished(unfinished, {**training.state_dict(), SEEDS: of_seeds})
                    saved = time.monotonic()

    def _store(self, folder: RunFolder) -> ModelStore:
        return self.models[folder.root].store

    @cached_property
    def _test_examples(self) -> Examples:
        return self._examples(self.stream.test_indices())

    def _examples(self, rows: Any) -> Examples:
        return self.source.normalised(self._bytes(rows)), self._labels(rows)

    def _bytes(self, rows: Any) -> Tensor:
        return torch.from_numpy(self.stream.images[rows]).to(self.settings.device)

    def _labels(self, rows: Any) -> Tensor:
        return torch.from_numpy(self.stream.labels[rows]).to(self.settings.device)


@dataclass(frozen=True)
class ImageStep(Step):
    """A step of a stage; see `steps.Step`.

    Attributes:
        backend: of all runs.
        folder: of the run.
    """

    backend: ImageBackend
    folder: RunFolder


@dataclass(frozen=True)
class TrainImages(ImageStep):
    """Trains models of a stage in one network."""

    trainings: tuple[Training, ...]

    @property
    def trains(self) -> tuple[ModelId, ...]:
        """The models."""
        return tuple(training.model for training in self.trainings)

    def is_done(self, model: Optional[ModelId] = None) -> bool:
        """Tell whether the checkpoints are there, whole."""
        return all(self.backend.is_there(self.folder, each) for each in self.trains if model in (None, each))

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Train what is not there."""
        return self.backend.train(work, self.trainings)


class TestImages(ImageStep):
    """Tests what predicts after the stage."""

    def run(self, work: StageWork) -> Mapping[str, Any]:
        """Test."""
        return self.backend.test(work)


def _resume(training: StageTraining, before: Mapping[str, Any], path: Path) -> None:
    """Resume a training that was cut off. Raises AlmaError if the file is not of this training."""
    try:
        training.load_state_dict(before)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise AlmaError(
            f"{path}: not of this training ({error}); remove it to train the stage from its beginning"
        ) from error


def _bootstrap(training: Training, plan: StagePlan, num_images: int) -> Optional[Tensor]:
    if not training.bootstrap:
        return None
    return bootstrap(num_images, seeded(training.seed, plan.stage.index, BOOTSTRAP))


def _num_params(state: Mapping[str, Tensor]) -> int:
    """Count parameters; what batch norm measures is none."""
    return sum(tensor.numel() for name, tensor in state.items() if not name.rpartition(".")[2].startswith("running_"))
