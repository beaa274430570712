"""Train and test the models of a stage on images, in this process.

One network contains all members of a stage, for all runs that differ only in the seed. Trained models remain in memory.
"""

import time
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

import numpy as np
import torch
from torch import Tensor

from fairseq_alma.checkpoints.checkpoint_file import write_checkpoint
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import sweep
from fairseq_alma.growth.gate_tree import nested_gate_trees
from fairseq_alma.images.firefly import grow_firefly
from fairseq_alma.images.image_models import GrownLayers
from fairseq_alma.images.mixtures import grow_losing_experts
from fairseq_alma.images.model_store import (
    UNFINISHED,
    Examples,
    ImageSettings,
    ModelStore,
    Predictions,
    TrainedModel,
    build_network,
    measure,
    read_unfinished,
    write_experts,
)
from fairseq_alma.images.networks import VGG, ImageNetwork, measure_batch_norm
from fairseq_alma.images.stage_training import (
    BOOTSTRAP,
    GROWTH,
    INITIAL_WEIGHTS,
    ORDER,
    ImageInput,
    StageTraining,
    TrainingImages,
    batch_sizes,
    bootstrap,
    seeded,
)
from fairseq_alma.learners.learner import ModelId, StagePlan, Training, member_seed
from fairseq_alma.runs.loop import Run, StageWork, Step
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.runs.study import SAVE_EVERY_SECONDS, RunRequest, seconds_of
from fairseq_alma.training.feature import Features, Part
from fairseq_alma.training.features import LRBranch
from fairseq_alma.training.stage_task import keep_freed_memory

SEEDS = "seeds"
"""Key in the file of an unfinished training run; the value is the list of the models' random seeds."""
GROWTH_FLOPS = "growth_flops"
"""Key in stage.json for the FLOPs of Firefly's growth step; ``train_flops`` includes these FLOPs."""


class StageTrainer:
    """Back end of ``alma-stream`` for streams of images: trains the stages of runs that differ only in the seed.

    Args:
        settings: settings of all runs.
        runs: runs whose stages are trained together.
        request: options of ``alma-stream``.
        features: training features of all runs.

    Attributes:
        stores: root folder of each run -> store of the run's models.
        test_examples: normalized images and labels of the test set.
    """

    def __init__(self, settings: ImageSettings, runs: Sequence[Run], request: RunRequest, features: Features) -> None:
        keep_freed_memory()
        self.settings, self.request, self.features, self.branch = settings, request, features, features[LRBranch]
        self.stream, self.last_stage = settings.stream, len(runs[0].plans) - 1
        self.save_every = seconds_of(request.save_every) or SAVE_EVERY_SECONDS
        self.source = ImageInput(self.stream.mean, self.stream.std, self.stream.augment, settings.device)
        grows = any(training.growth for plan in runs[0].plans for training in plan.trainings)
        how = settings, features.predicts_with, None if grows else settings.read_grown({})
        self.stores = {run.folder.root: ModelStore(run.folder, *how) for run in runs}
        self.test_examples = self._examples(self.stream.indices("test"))
        self.predictions = {root: Predictions(store, self.test_examples) for root, store in self.stores.items()}

    def steps(self, folder: RunFolder, plan: StagePlan) -> "list[ImageStep]":
        groups = [tuple(plan.trainings)]
        if self.request.trains_members_separately:
            groups = [(training,) for training in plan.trainings]
        return [*(ImageStep(self, folder, group) for group in groups), ImageStep(self, folder, ())]

    def keep_only(
        self, folder: RunFolder, stages: Sequence[int], needed: Sequence[ModelId], gone: Sequence[ModelId]
    ) -> None:
        self.stores[folder.root].remove(gone)

    def train(self, work: StageWork, trainings: tuple[Training, ...]) -> Mapping[str, Any]:
        """Train the models of ``trainings`` in a stage, and return the training cost for stage.json.

        If ``trainings`` contains all models of the stage, the same network may train models of runs with other seeds.
        If the checkpoint of a model is missing, train all models of the network again, with bit-identical results.
        """
        own = replace(work, plan=replace(work.plan, trainings=trainings))
        works = [own] if trainings != work.plan.trainings else work.in_step or [own]
        group = [(self.stores[each.folder.root], training) for each in works for training in each.plan.trainings]
        plan = works[0].plan
        unfinished = works[0].folder.model_folder(plan.trainings[0].model) / UNFINISHED
        if any(training.model not in store for store, training in group):
            self._train_stage(works[0], group, unfinished)
        unfinished.unlink(missing_ok=True)
        sweep(unfinished.parent)

        store = self.stores[work.folder.root]
        models = [store[training.model] for training in trainings]
        described = self.features.describe(self._part(len(self.stream.indices("train", plan.stage.megabatches))))
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
        """Test the models that predict after a stage. Return the results for stage.json."""
        plan, store, predictions = work.plan, self.stores[work.folder.root], self.predictions[work.folder.root]
        valid = predictions.on_valid(plan, self._examples(self.stream.indices("valid", plan.stage.megabatches)))
        test, usage = predictions.on_test(plan)
        models = [store[model] for model in plan.predictors]
        figures: dict[str, Any] = {
            # batch norm statistics are not parameters
            "num_params": sum(
                tensor.numel() for model in models for name, tensor in model.state.items() if ".running_" not in name
            ),
            "num_experts": max((tree.num_experts for model in models for tree in model.grown.trees), default=1),
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
        if self.request.keep_checkpoints or plan.stage.index == self.last_stage:
            network = [*store.networks_of(plan).values()][-1]
            write_experts(work.folder.stage_folder(plan.stage.index), network, self.test_examples[0])
        return figures

    def _train_stage(self, work: StageWork, group: Sequence[tuple[ModelStore, Training]], unfinished: Path) -> None:
        """Train a stage from the beginning, or resume from the file ``unfinished``.

        ``group`` contains (model store of the run, training) for each model of the network.
        """
        stage, how, seeds = work.plan.stage, self.settings.options.loop, [training.seed for _, training in group]
        rows = self.stream.indices("train", stage.megabatches)
        own = [
            bootstrap(len(rows), seeded(training.seed, stage.index, BOOTSTRAP)) if training.bootstrap else None
            for _, training in group
        ]
        data = TrainingImages(*self._load(rows), own, self.source)
        valid = self._examples(self.stream.indices("valid", stage.megabatches))
        network, grown, growth = self._start(work.plan, group, rows, valid)

        part, images_of_branch = self._part(data.num_images), 0

        def training_of(network: ImageNetwork, part: Part, *branch: Any) -> StageTraining:
            orders = [seeded(seed, stage.index, ORDER) for seed in seeds]
            optimizer = self.settings.build_optimizer(network.parameters())
            return StageTraining(network, optimizer, data, *valid, how, orders, self.features.for_part(part), *branch)

        branch: tuple[Any, ...] = ()
        if self.branch.is_on:  # train a branch (copy of the model with a decaying learning rate)
            total = part.num_updates or 0
            sizes = batch_sizes(data.num_images, how.batch_size)
            epochs, updates = divmod(total - self.branch.num_updates(total), len(sizes))
            branch = training_of(deepcopy(network), replace(part, is_branch=True)), epochs
            images_of_branch = (how.max_epoch - epochs) * data.num_images - sum(sizes[:updates])
        training = training_of(network, part, *branch)
        self._run(work, training, seeds, unfinished)
        training.finish()

        tested = self._tested(training, grown, rows)
        for unit, (store, member) in enumerate(group):
            epochs = training.epochs_of(unit)
            num_images = epochs * data.num_images + images_of_branch
            store[member.model] = TrainedModel(
                training.states[unit], grown, epochs * training.updates_per_epoch, num_images, growth, tested[unit]
            )

    def _start(
        self, plan: StagePlan, group: Sequence[tuple[ModelStore, Training]], rows: np.ndarray, valid: Examples
    ) -> tuple[ImageNetwork, GrownLayers, Mapping[str, Any]]:
        """Return (initial network of a stage, its layer sizes, record of the growth step, or {} without growth)."""
        settings, first, model_class = self.settings, group[0][1], self.settings.model_class
        if first.start is None:
            network, members = settings.build(len(group)), range(settings.num_joint)
            seeds = [member_seed(training.seed, member) for _, training in group for member in members]
            network.reset_parameters([seeded(seed, INITIAL_WEIGHTS) for seed in seeds])
            return network.to(settings.device), model_class.grown_layers(network), {}
        before = [store[training.start] for store, training in group if training.start is not None]
        network = build_network(settings, before)
        if (how := first.growth) is None:
            return network, before[0].grown, {}
        growth: dict[str, Any] = {"before_growth": {"valid": measure(network, *valid)}}
        generator, flops = seeded(how.seed, plan.stage.index, GROWTH), 0
        if how.method == "firefly":
            assert isinstance(network, VGG)
            sizes = batch_sizes(len(rows), settings.options.loop.batch_size)
            batches = list(zip(*(each.split(sizes) for each in self._examples(rows)), strict=True))
            channels = settings.cfg.model.channels
            network, flops = grow_firefly(network, batches, channels, how.share, generator, how.share_of)
        else:  # the growth of mixtures counts no training FLOPs, because it uses only validation images
            for _ in range(how.num_new):
                grow_losing_experts(network, *valid, generator, how.method)
        growth["after_growth"] = {"valid": measure(network, *valid)}
        if flops:
            growth[GROWTH_FLOPS] = flops
        return network, model_class.grown_layers(network), growth

    def _part(self, num_images: int) -> Part:
        """Return a `Part` that ends a stage with ``num_images`` training images after its last epoch."""
        how = self.settings.options.loop
        return Part(0, how.max_epoch * len(batch_sizes(num_images, how.batch_size)))

    def _tested(
        self, training: StageTraining, grown: GrownLayers, rows: np.ndarray
    ) -> Sequence[Optional[Mapping[str, Tensor]]]:
        """Return the weights to test for each unit (member or joint model); averages get new batch norm statistics."""
        averages = [each for each in training.tested if each is not None]
        if self.features.predicts_with != "average" or all(
            torch.equal(tensor, state[name])
            for average, state in zip(averages, training.states, strict=True)
            for name, tensor in average.items()
        ):  # the averages equal the weights of the best epochs
            return training.tested
        network = build_network(self.settings, [TrainedModel(state, grown, 0, 0) for state in averages])
        measure_batch_norm(network, self._examples(rows)[0].split(batch_sizes(len(rows), training.loop.batch_size)))
        return [{name: tensor.clone() for name, tensor in state.items()} for state in network.model_states()]

    def _run(self, work: StageWork, training: StageTraining, seeds: list[int], unfinished: Path) -> None:
        """Resume from ``unfinished`` if the file exists, run all remaining epochs, and save the state at intervals."""
        before = read_unfinished(unfinished)
        if before is not None and before.get(SEEDS) == seeds:  # with other seeds, the file belongs to other runs
            try:
                training.load_state_dict(before)
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise AlmaError(
                    f"{unfinished}: the training state does not match the options of this run ({error}); remove "
                    "the file to restart the stage"
                ) from error
        per_epoch, num_images = training.updates_per_epoch, training.data.num_images * len(seeds)
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
                    write_checkpoint({**training.state_dict(), SEEDS: seeds}, unfinished)
                    saved = time.monotonic()

    def _examples(self, rows: np.ndarray) -> Examples:
        images, labels = self._load(rows)
        return self.source.normalised(images), labels

    def _load(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return (uint8 images, labels) at indices ``rows`` of the stream, on the device."""
        arrays = self.stream.images[rows], self.stream.labels[rows]
        images, labels = (torch.from_numpy(array).to(self.settings.device) for array in arrays)
        return images, labels


@dataclass(frozen=True)
class ImageStep(Step):
    """Step of a stage: train the models of ``trainings`` in one network; without trainings, test the stage's models."""

    trainer: StageTrainer
    folder: RunFolder
    trainings: tuple[Training, ...]

    @property
    def trains(self) -> tuple[ModelId, ...]:
        return tuple(training.model for training in self.trainings)

    def is_done(self, model: Optional[ModelId] = None) -> bool:
        models = [each for each in self.trains if model in (None, each)]
        store = self.trainer.stores[self.folder.root]
        return bool(self.trainings) and all(store.is_complete(each) for each in models)

    def run(self, work: StageWork) -> Mapping[str, Any]:
        return self.trainer.train(work, self.trainings) if self.trainings else self.trainer.test(work)
