"""Trains and tests the models of a stage on images, in this process.

All members of a stage are trained side by side in one network, also those of runs that differ only by their seeds.
Trained models stay in memory.
"""

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Sequence

import numpy as np
import torch
from torch import Tensor

from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import nested_gate_trees
from fairseq_alma.images.image_batches import (
    BOOTSTRAP,
    GROWTH,
    INITIAL_WEIGHTS,
    ORDER,
    ImageInput,
    TrainingImages,
    batch_sizes,
    bootstrap,
    rows_to_train_on,
    seeded,
)
from fairseq_alma.images.image_classifier import GrownLayers, GrowthData
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
from fairseq_alma.images.networks import ImageNetwork, measure_batch_norm, member_states
from fairseq_alma.images.predictions import Examples, Predictions, measure, write_experts
from fairseq_alma.images.stage_training import StageTraining
from fairseq_alma.learners.learner import Stage, StagePlan, Training, member_seed
from fairseq_alma.runs.loop import Run, StageWork
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.training.branch import LRBranch
from fairseq_alma.training.feature import Features, Part

SAVE_EVERY_SECONDS = 20.0
"""Default interval between two saves of an unfinished training."""
SEEDS = "seeds"
"""Key in the file of an unfinished training: the seeds of what is trained."""
GROWTH_FLOPS = "growth_flops"
"""Key in stage.json: the part of train_flops that Firefly's growth step took."""
Group = Sequence[tuple[ModelStore, Training]]
"""Trainings side by side, each with the models of its run."""


@dataclass(frozen=True)
class Start:
    """The network that a stage starts from, what growth has changed up to now, and this growth step's record."""

    network: ImageNetwork
    grown: GrownLayers
    growth: Mapping[str, Any] = field(default_factory=dict)


class StageTrainer:
    """Trains and tests the stages of some runs.

    Args:
        settings: of the runs, which differ only by their seeds.
        runs: their stages are trained together.
        shared_folder: of the unfinished training of several runs.
        wait: mega-batches of a stage.
        keep_maps: write the experts of the test images after every stage, not only after the last one.
        features: of the trainings.
        save_every: seconds between two saves of an unfinished training.
    """

    def __init__(
        self,
        settings: ImageSettings,
        runs: Sequence[Run],
        shared_folder: Path,
        wait: int,
        keep_maps: bool,
        features: Features,
        save_every: Optional[float] = None,
    ) -> None:
        self.settings, self.shared_folder, self.wait = settings, shared_folder, wait
        self.keep_maps, self.features, self.branch = keep_maps, features, features[LRBranch]
        self.stream, self.last_stage = settings.stream, len(runs[0].plans) - 1
        self.save_every = SAVE_EVERY_SECONDS if save_every is None else save_every
        self.source = ImageInput(self.stream.mean, self.stream.std, self.stream.augment).to(settings.device)
        self.stores = {run.folder.root: ModelStore(run.folder, settings, features.predicts_with) for run in runs}
        self.predictions = {root: Predictions(store, self._test_examples) for root, store in self.stores.items()}

    def store(self, folder: RunFolder) -> ModelStore:
        return self.stores[folder.root]

    def train(self, work: StageWork, trainings: tuple[Training, ...]) -> Mapping[str, Any]:
        """Train some models of a stage, or all of them together with those of the other runs, unless they exist."""
        own = replace(work, plan=replace(work.plan, trainings=trainings))
        works = [own] if trainings != work.plan.trainings else work.in_step or [own]
        group = [(self.store(each.folder), training) for each in works for training in each.plan.trainings]
        if any(training.model not in store for store, training in group):
            self._train_stage(works, group)
        # If a model is missing, all are trained again from the same file, bit for bit.
        remove_unfinished(self._unfinished(works))
        return self._cost(own)

    def _cost(self, work: StageWork) -> Mapping[str, Any]:
        store, stage = self.store(work.folder), work.plan.stage
        models = [store[training.model] for training in work.plan.trainings]
        described = self.features.describe(self._part(len(self._rows(stage, work.plan.trainings[0].seed))))
        return {
            "num_updates": max(model.num_updates for model in models),
            "train_images": sum(model.num_images for model in models),
            "train_flops": sum(
                model.num_images * store.flops_of(model.grown).train + model.growth.get(GROWTH_FLOPS, 0)
                for model in models
            ),
            **({"anytime": described} if described else {}),
        }

    def test(self, work: StageWork) -> Mapping[str, Any]:
        plan, store, predictions = work.plan, self.store(work.folder), self.predictions[work.folder.root]
        valid = predictions.on_valid(plan, self._examples(self.stream.valid_indices(plan.stage.megabatches)))
        test, usage = predictions.on_test(plan)
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
        if self.keep_maps or plan.stage.index == self.last_stage:
            network = store.network_of(plan.predictors[-trained:])
            write_experts(work.folder.stage_folder(plan.stage.index), network, self._test_examples)
        return figures

    def _train_stage(self, works: Sequence[StageWork], group: Group) -> None:
        """Train the network of a stage, from its beginning or from where it was interrupted."""
        stage = works[0].plan.stage
        each = [self._rows(stage, training.seed) for _, training in group]
        rows, seen = (each[0], None) if not self.features.draws_earlier else np.unique(each, return_inverse=True)
        own = [
            bootstrap(len(each[0]), seeded(training.seed, stage.index, BOOTSTRAP)) if training.bootstrap else None
            for _, training in group
        ]
        if seen is not None:  # each member sees other images
            places = torch.from_numpy(seen.reshape(len(group), -1))
            own = [place if drawn is None else place[drawn] for place, drawn in zip(places, own, strict=True)]
        data = TrainingImages(self._bytes(rows), self._labels(rows), own, self.source)
        valid = self._examples(self.stream.valid_indices(stage.megabatches))
        features = self.features.for_part(self._part(data.num_images))
        start = self._start(works[0].plan, group, lambda: self._examples(rows), valid)
        orders = [seeded(training.seed, stage.index, ORDER) for _, training in group]
        training = StageTraining(
            start.network, data, *valid, self.settings.training(), orders, features, *self._copy(data.num_images)
        )
        self._run(works, training, [each.seed for _, each in group])
        training.finish()
        tested = self._tested(training, start.grown, rows)
        of_copy = self._images_of_copy(data)

        for unit, (store, member) in enumerate(group):
            epochs = training.epochs_of(unit)
            counts = (epochs * training.updates_per_epoch, epochs * data.num_images + of_copy)
            store[member.model] = TrainedModel(training.states[unit], start.grown, *counts, start.growth, tested[unit])

    def _start(self, plan: StagePlan, group: Group, examples: Callable[[], Examples], valid: Examples) -> Start:
        """Return a new network, or that of the stage before, grown if the learner grows."""
        settings, first, stage = self.settings, group[0][1], plan.stage.index
        seeds = [training.seed for _, training in group]
        if settings.is_joint:
            seeds = [member_seed(first.seed, member) for member in range(settings.num_joint)]
        if first.start is None:
            network = settings.build(len(seeds))
            network.reset_parameters([seeded(seed, INITIAL_WEIGHTS) for seed in seeds])
            return Start(network.to(settings.device), settings.grown_layers(network))
        before = [store[training.start] for store, training in group if training.start is not None]
        network = build_network(settings, before)
        if first.growth is None:
            return Start(network, before[0].grown)
        generator = seeded(first.growth.seed, stage, GROWTH)
        before_growth = {"valid": measure(network, *valid)}
        data = GrowthData(examples, valid, settings.training().batch_size)
        network, flops = settings.model_class.grow(network, first.growth, settings.cfg.model, data, generator)
        figures: dict[str, Any] = {"before_growth": before_growth, "after_growth": {"valid": measure(network, *valid)}}
        return Start(network, settings.grown_layers(network), figures | ({GROWTH_FLOPS: flops} if flops else {}))

    def _part(self, num_images: int, is_branch: bool = False) -> Part:
        """Return the part that features see of a training; early stops do not count."""
        how = self.settings.training()
        return Part(0, how.max_epoch * len(batch_sizes(num_images, how.batch_size)), is_branch)

    def _copy(self, num_images: int) -> tuple[Any, ...]:
        """Return the features of a copy with decaying rate and the update at which it begins; () without one."""
        if not self.branch.copies:
            return ()
        part = self._part(num_images, is_branch=True)
        return self.features.for_part(part), (part.num_updates or 0) - self.branch.num_updates(part.num_updates or 0)

    def _images_of_copy(self, data: TrainingImages) -> int:
        """Return the number of images that the copy is trained on after it begins to differ."""
        if not self.branch.copies:
            return 0
        how = self.settings.training()
        sizes = data.sizes(how.batch_size)
        whole = how.max_epoch * len(sizes)
        epochs, updates = divmod(whole - self.branch.num_updates(whole), len(sizes))
        return (how.max_epoch - epochs) * data.num_images - sum(sizes[:updates])

    def _tested(
        self, training: StageTraining, grown: GrownLayers, rows: np.ndarray
    ) -> Sequence[Optional[Mapping[str, Tensor]]]:
        """Return the tested weights of each unit; averages of weights get batch norm statistics of their own."""
        averages = [each for each in training.tested if each is not None]
        is_last = all(  # the average is the weights themselves
            torch.equal(tensor, state[name])
            for average, state in zip(averages, training.states, strict=False)
            for name, tensor in average.items()
        )
        if self.features.predicts_with != "average" or is_last:
            return training.tested
        network = build_network(self.settings, [TrainedModel(state, grown, 0, 0) for state in averages])
        measure_batch_norm(network, self._examples(rows)[0].split(batch_sizes(len(rows), training.settings.batch_size)))
        states = [network.state_dict()] if self.settings.is_joint else member_states(network)
        return [{name: tensor.clone() for name, tensor in state.items()} for state in states]

    def _unfinished(self, works: Sequence[StageWork]) -> Path:
        plan = works[0].plan
        if len(works) == 1:
            return works[0].folder.model_folder(plan.trainings[0].model) / UNFINISHED
        # Runs of other seeds may be trained from the same folder at the same time, those of the same may not.
        return self.shared_folder / f"stage-{plan.stage.index:03d}-{works[0].folder.name}-{UNFINISHED}"

    def _run(self, works: Sequence[StageWork], training: StageTraining, of_seeds: list[int]) -> None:
        """Run all epochs, and save the state to resume from at intervals."""
        work, unfinished = works[0], self._unfinished(works)
        before = read_unfinished(unfinished)
        if before is not None and before.get(SEEDS) == of_seeds:  # otherwise other runs share the folder
            try:
                training.load_state_dict(before)
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise AlmaError(
                    f"{unfinished}: not of this training ({error}); remove it to train the stage from its beginning"
                ) from error
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
                if now - saved >= self.save_every and not training.is_over:
                    write_unfinished(unfinished, {**training.state_dict(), SEEDS: of_seeds})
                    saved = time.monotonic()

    @cached_property
    def _test_examples(self) -> Examples:
        return self._examples(self.stream.test_indices())

    def _rows(self, stage: Stage, seed: int) -> np.ndarray:
        return rows_to_train_on(self.stream, stage.megabatches, self.wait, self.features, seed)

    def _examples(self, rows: np.ndarray) -> Examples:
        return self.source.normalised(self._bytes(rows)), self._labels(rows)

    def _bytes(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(self.stream.images[rows]).to(self.settings.device)

    def _labels(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(self.stream.labels[rows]).to(self.settings.device)


def _num_params(state: Mapping[str, Tensor]) -> int:
    """Count parameters, without the statistics of batch norm."""
    return sum(tensor.numel() for name, tensor in state.items() if not name.rpartition(".")[2].startswith("running_"))
