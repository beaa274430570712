"""Train and test the models of a stage on images, in this process: batches, epochs, and selection of the best epoch.

One network contains all members of a stage, for all runs that differ only in the seed. Trained models remain in memory.

The best epoch is selected by validation (paper v1, section 5). A *unit* is one member, or all members of a joint model.
Each unit has a separate image order, best epoch and early stopping, so a unit gets the same weights as in a separate
training run. A *branch* is a copy of the model that is trained with a decaying learning rate. If there is a branch, the
branch predicts on the test set; the next stage starts from the model without the decay.

Letters in shapes: N members, U units, B images in a batch, S images in an epoch, C channels, H height, W width, K
classes.
"""

import math
import time
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.checkpoints.checkpoint_file import write_checkpoint
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import sweep
from fairseq_alma.growth.gate_tree import nested_gate_trees
from fairseq_alma.images.firefly import grow_firefly
from fairseq_alma.images.image_job import LoopOptions
from fairseq_alma.images.image_models import GrownLayers
from fairseq_alma.images.mixtures import grow_losing_experts, mixture_layers
from fairseq_alma.images.model_store import (
    UNFINISHED,
    Examples,
    ImageSettings,
    ModelStore,
    TrainedModel,
    build_network,
    measure,
    read_unfinished,
    write_experts,
)
from fairseq_alma.images.networks import VGG, ImageNetwork, in_chunks, load_exactly, measure_batch_norm
from fairseq_alma.learners.learner import ModelId, StagePlan, Training, member_seed
from fairseq_alma.runs.loop import Run, StageWork, Step
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.runs.study import SAVE_EVERY_SECONDS, RunRequest, seconds_of
from fairseq_alma.training.feature import Features, Part
from fairseq_alma.training.features import LRBranch

INITIAL_WEIGHTS, ORDER, BOOTSTRAP, GROWTH = range(4)
PADDING = 4


def seeded(*numbers: int) -> torch.Generator:
    """Return a random generator on the CPU, seeded with ``numbers`` (such as random seed, stage number, `ORDER`)."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)


class ImageInput:
    """Converter of uint8 images to network input.

    Args:
        mean: mean of each channel over the training images of the data set, for pixel values from 0 to 1.
        std: standard deviation of each channel, on the same scale as ``mean``.
        augment: whether training images are padded with 4 black pixels on each side, cropped at random and flipped
            horizontally with probability 0.5.
        device: device of the images; None: CPU.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], augment: bool, device: Optional[torch.device] = None
    ) -> None:
        self.augment = augment
        self.mean = 255 * torch.tensor(mean)[:, None, None].to(device)
        self.std = 255 * torch.tensor(std)[:, None, None].to(device)

    def normalised(self, images: Tensor) -> Tensor:
        """Normalize uint8 images (..., C, H, W) with the mean and the standard deviation of each channel."""
        return (images.float() - self.mean) / self.std

    def augmented(self, images: Tensor, generator: Generator) -> Tensor:
        """Crop and flip uint8 images (B, C, H, W) with a random generator on the CPU; return the normalized images."""
        batch, _, height, width = images.shape
        device = images.device
        top, left = torch.randint(2 * PADDING + 1, (2, batch, 1), generator=generator)
        flip = torch.rand(batch, 1, generator=generator) < 0.5
        rows = top + torch.arange(height)  # (B, H)
        columns = left + torch.where(flip, torch.arange(width - 1, -1, -1), torch.arange(width))  # (B, W)
        padded = F.pad(images, (PADDING,) * 4).permute(0, 2, 3, 1)  # (B, H, W, C), for contiguous reads
        each = torch.arange(batch, device=device)[:, None, None]
        crops = padded[each, rows.to(device)[:, :, None], columns.to(device)[:, None]]
        return self.normalised(crops.permute(0, 3, 1, 2).contiguous())


class TrainingImages:
    """Training images of a stage, with the selection of images that each member trains on.

    Args:
        images: uint8 images (n, C, H, W).
        labels: int64 labels (n).
        rows: for each member, indices (S) of ``images``, such as a bootstrap sample; None: each image once.
        source: converter of the images to network input.
    """

    def __init__(self, images: Tensor, labels: Tensor, rows: Sequence[Optional[Tensor]], source: ImageInput) -> None:
        self.images = images if source.augment else source.normalised(images)
        self.labels, self.source = labels, source
        everything = torch.arange(len(labels))
        self.rows = [everything if own is None else own for own in rows]
        self.rows_are_shared = all(own is None for own in rows)
        self.num_images = len(self.rows[0])

    def epoch(self, batch_size: int, generators: Sequence[Generator]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of one epoch. Each member's generator determines the member's image order and crops.

        Yields:
            (images, labels): images (N, B, C, H, W), or (B, C, H, W) if all members share a batch; labels (N, B).
        """
        if self.num_images <= batch_size and not self.source.augment and self.rows_are_shared:  # one batch
            yield self.images, self.labels.expand(len(self.rows), -1)
            return
        orders = [
            rows[torch.randperm(len(rows), generator=one)] for rows, one in zip(self.rows, generators, strict=True)
        ]
        for batch in zip(*(order.split(batch_sizes(self.num_images, batch_size)) for order in orders), strict=True):
            rows = torch.stack(batch)
            images = self.images[rows]
            if self.source.augment:
                members = zip(images, generators, strict=True)
                images = torch.stack([self.source.augmented(own, generator) for own, generator in members])
            yield images, self.labels[rows]


def batch_sizes(num_images: int, batch_size: int) -> list[int]:
    """Return the batch sizes of an epoch. A single last image joins the previous batch: batch norm needs two images."""
    full, rest = divmod(num_images, batch_size)
    sizes = [batch_size] * full + [rest] * (rest > 0)
    if rest == 1 and full:
        sizes[-2:] = [batch_size + 1]
    return sizes


def bootstrap(num_images: int, generator: Generator) -> Tensor:
    """Return a bootstrap sample: ``num_images`` row indices, sampled with replacement (Breiman 1996, bagging)."""
    return torch.randint(num_images, (num_images,), generator=generator)


@dataclass
class UnitProgress:
    """Training progress of one unit: a member, or all members of a joint model."""

    best_score: float = math.inf  # lowest score so far, see `validation_scores`
    best_epoch: int = 0  # epoch with the best score, numbered from 1; 0: no epoch yet
    stopped_after: Optional[int] = None  # number of epochs before early stopping; None: not stopped


class StageTraining:
    """Training of one stage. After any epoch, a new object can resume from the `state_dict`.

    Args:
        network: network with initial weights, on the device for training.
        optimizer: optimizer of the parameters of the network.
        data: training images.
        valid_images: normalized validation images (B, C, H, W).
        valid_labels: int64 labels (B) of the validation images.
        loop: options of the training loop.
        generators: random generators on the CPU for image order and crops: one for each member, or one for a joint
            model.
        features: training features; None for no features.
        branch: training of a copy of the network, from the state before an epoch of this training; None if no branch
            is trained.
        branch_epoch: number of completed epochs at which the branch starts.

    Attributes:
        best: weights of the best epoch, for each unit.
        tested: weights to test, for each unit; None: weights of the best epoch.
    """

    def __init__(
        self,
        network: ImageNetwork,
        optimizer: torch.optim.Optimizer,
        data: TrainingImages,
        valid_images: Tensor,
        valid_labels: Tensor,
        loop: LoopOptions,
        generators: Sequence[Generator],
        features: Optional[Features] = None,
        branch: "Optional[StageTraining]" = None,
        branch_epoch: int = 0,
    ) -> None:
        self.features, self.branch, self.branch_epoch = features or Features(), branch, branch_epoch
        self.network, self.optimizer, self.data, self.loop = network, optimizer, data, loop
        self.valid_images, self.valid_labels = valid_images, valid_labels
        self.generators = list(generators)
        self.epoch = 0
        self.updates_per_epoch = len(batch_sizes(data.num_images, loop.batch_size))
        self.states = network.model_states()  # views
        self.best = [{name: tensor.clone() for name, tensor in state.items()} for state in self.states]
        self.tested: list[Optional[dict[str, Tensor]]] = [None] * len(self.states)
        self.units = [UnitProgress() for _ in self.states]

    @property
    def is_over(self) -> bool:
        """Return whether the training of all units is complete; the branch is trained before the remaining epochs."""
        return self.epoch >= self.loop.max_epoch or all(unit.stopped_after is not None for unit in self.units)

    @property
    def num_epochs(self) -> tuple[int, int]:
        """Return (completed epochs, maximum epochs), including the branch."""
        done, most = self.epoch, self.loop.max_epoch
        if self.branch is not None:
            done += max(0, self.branch.epoch - self.branch_epoch)
            most += self.loop.max_epoch - self.branch_epoch
        return done, most

    def epochs_of(self, unit: int) -> int:
        """Return the number of epochs that a unit was trained for."""
        return self.units[unit].stopped_after or self.epoch

    def run_epoch(self) -> Tensor:
        """Train for one epoch, validate, and update ``best``. Return the units' mean loss (nats) in the last update."""
        if self.branch is not None and self.epoch == self.branch_epoch and not self.branch.is_over:
            if self.branch.epoch == 0:
                self.branch.load_state_dict(deepcopy(self.state_dict()))
            return self.branch.run_epoch()
        self.network.train()
        batches = self.data.epoch(self.loop.batch_size, self.generators)
        for update, (images, labels) in enumerate(batches, start=self.epoch * self.updates_per_epoch):
            self.optimizer.zero_grad()
            with self.features.around_forward(self.network):
                loss = self._loss(images, labels)
            loss.backward()
            self.features.before_step(self.optimizer, update)
            self.optimizer.step()
            self.features.after_step(self.network, update)
            counts = dict.fromkeys(("ntokens", "nsentences", "sample_size"), labels.numel())
            self.features.count([{"loss": loss.detach(), **counts}])  # N models count an image N times
        self.epoch += 1
        self._select()
        return loss.detach() / len(self.units)

    def finish(self) -> None:
        """Load the best weights of each unit into the network, for the next stage. The branch is tested instead."""
        if self.branch is not None:
            self.tested = [*self.branch.best]
        for state, best in zip(self.states, self.best, strict=True):
            load_exactly(state, best)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generators": [generator.get_state() for generator in self.generators],
            "best": self.best,
            "tested": self.tested,
            "units": [vars(unit) for unit in self.units],
            "features": self.features.state_dict(),
            "branch": self.branch.state_dict() if self.branch is not None and self.branch.epoch else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`. Loading the state of a different training run may raise any exception."""
        load_exactly(self.network.state_dict(), state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        for generator, before in zip(self.generators, state["generators"], strict=True):
            generator.set_state(before)
        for best, before in zip(self.best, state["best"], strict=True):
            load_exactly(best, before)
        self.units = [UnitProgress(**unit) for unit in state["units"]]
        self.features.load_state_dict(state["features"])
        device = self.valid_labels.device
        self.tested = [each and {name: tensor.to(device) for name, tensor in each.items()} for each in state["tested"]]
        self.epoch = state["epoch"]
        if self.branch is not None and state["branch"] is not None:
            self.branch.load_state_dict(state["branch"])

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        logits = self.network(images, self.generators)
        # The sum of the units' mean cross entropies: the gradients of the units are independent.
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / labels.size(1)

    def _select(self) -> None:
        with self.features.around_forward(self.network):
            scores = validation_scores(self.network, self.valid_images, self.valid_labels, self.loop.select)
        patience = math.inf if self.loop.patience is None else self.loop.patience
        for number, (unit, score, state) in enumerate(zip(self.units, scores, self.states, strict=True)):
            if unit.stopped_after is not None:
                continue
            if self.loop.is_better(score, unit.best_score):
                unit.best_score, unit.best_epoch = score, self.epoch
                load_exactly(self.best[number], state)
                if (own := self.features.to_test(self.network)) is not None:
                    mine = self.network.model_states(own)[number]
                    self.tested[number] = self.best[number] | {name: tensor.clone() for name, tensor in mine.items()}
                continue
            is_out_of_patience = self.epoch - unit.best_epoch >= patience
            if not unit.best_epoch and (is_out_of_patience or self.epoch == self.loop.max_epoch):
                raise AlmaError(
                    f"training diverged: the validation score is {score} after {self.epoch} epochs; start a new --run "
                    "with a lower --lr"
                )
            if is_out_of_patience:
                unit.stopped_after = self.epoch


@torch.no_grad()
def validation_scores(network: nn.Module, images: Tensor, labels: Tensor, select: str) -> list[float]:
    """Return the validation score of each unit, and leave the network in evaluation mode.

    If ``select`` is ``loss``, the score is the mean cross entropy in nats. If ``select`` is ``accuracy``, the score is
    the error (0 to 1), or NaN if a logit is not finite.
    """
    network.eval()
    logits = torch.cat([network(chunk) for chunk in in_chunks(images)], dim=1).float()  # (U, B, K)
    if select == "accuracy":
        errors = (logits.argmax(dim=-1) != labels).double().mean(dim=1)
        return errors.where(logits.isfinite().all(dim=2).all(dim=1), torch.nan).tolist()
    return torch.stack([F.cross_entropy(each, labels) for each in logits]).tolist()


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
        self.settings, self.request, self.features, self.branch = settings, request, features, features[LRBranch]
        self.stream, self.last_stage = settings.stream, len(runs[0].plans) - 1
        self.save_every = seconds_of(request.save_every) or SAVE_EVERY_SECONDS
        self.source = ImageInput(self.stream.mean, self.stream.std, self.stream.augment, settings.device)
        grows = any(training.growth for plan in runs[0].plans for training in plan.trainings)
        how = settings, features.predicts_with, None if grows else settings.read_grown({})
        self.stores = {run.folder.root: ModelStore(run.folder, *how) for run in runs}
        self.test_examples = self._examples(self.stream.indices("test"))

    def steps(self, folder: RunFolder, plan: StagePlan) -> "list[ImageStep]":
        is_separate = self.request.trains_members_separately
        groups = [(training,) for training in plan.trainings] if is_separate else [plan.trainings]
        return [ImageStep(self, folder, group) for group in (*groups, ())]

    def keep_only(
        self, folder: RunFolder, stages: Sequence[int], needed: Sequence[ModelId], gone: Sequence[ModelId]
    ) -> None:
        self.stores[folder.root].remove(gone)

    def train(self, work: StageWork, trainings: tuple[Training, ...]) -> Mapping[str, Any]:
        """Train the models of ``trainings`` in a stage, and return the training cost for stage.json.

        If ``trainings`` contains all models of the stage, the same network may train models of runs with other seeds.
        If the checkpoint of a model is missing, train all models of the network again, with bit-identical results.
        """
        store = self.stores[work.folder.root]
        group = [(store, training) for training in trainings]
        if trainings == work.plan.trainings:
            works = work.in_step or [work]
            group = [(self.stores[each.folder.root], training) for each in works for training in each.plan.trainings]
        unfinished = group[0][0].folder.model_folder(group[0][1].model) / UNFINISHED
        if any(training.model not in each for each, training in group):
            self._train_stage(work, group, unfinished)
        unfinished.unlink(missing_ok=True)
        sweep(unfinished.parent)

        plan = work.plan
        models = [store[training.model] for training in trainings]
        described = self.features.describe(self._part(len(self.stream.indices("train", plan.stage.megabatches))))
        return {
            "num_updates": max(model.num_updates for model in models),
            "train_images": sum(model.num_images for model in models),
            "train_flops": sum(
                model.num_images * store.flops_of(model.grown).train + model.growth.get("growth_flops", 0)
                for model in models
            ),
            **({"anytime": described} if described else {}),
        }

    def test(self, work: StageWork) -> Mapping[str, Any]:
        """Test the models that predict after a stage. Return the results for stage.json."""
        plan, store = work.plan, self.stores[work.folder.root]
        examples = self._examples(self.stream.indices("valid", plan.stage.megabatches))
        valid = measure(store.networks_of(plan).values(), *examples, plan.combine)
        test, usage = store.test(plan, *self.test_examples)
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
        for model in models[-len(plan.trainings) :]:
            figures.update(model.growth)
            if model.grown.trees:
                figures["gate_trees"] = nested_gate_trees(model.grown.trees)
                figures["expert_usage"] = usage
        if models[-1].grown.trees and (self.request.keep_checkpoints or plan.stage.index == self.last_stage):
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
        settings, first = self.settings, group[0][1]
        if first.start is None:
            network, members = settings.build(len(group)), range(settings.num_joint)
            seeds = [member_seed(training.seed, member) for _, training in group for member in members]
            network.reset_parameters([seeded(seed, INITIAL_WEIGHTS) for seed in seeds])
            return network.to(settings.device), settings.read_grown({}), {}
        before = [store[training.start] for store, training in group if training.start is not None]
        network = build_network(settings, before)
        if (how := first.growth) is None:
            return network, before[0].grown, {}
        growth: dict[str, Any] = {"before_growth": {"valid": measure([network], *valid)}}
        generator, flops = seeded(how.seed, plan.stage.index, GROWTH), 0
        if how.method == "firefly":
            assert isinstance(network, VGG)
            sizes = batch_sizes(len(rows), settings.options.loop.batch_size)
            batches = list(zip(*(each.split(sizes) for each in self._examples(rows)), strict=True))
            channels = settings.cfg.model.channels
            network, flops = grow_firefly(network, batches, channels, how.share, generator, how.share_of)
            grown = GrownLayers(channels=network.channels)
        else:  # the growth of mixtures counts no training FLOPs, because it uses only validation images
            for _ in range(how.num_new):
                grow_losing_experts(network, *valid, generator, how.method)
            grown = GrownLayers(trees=tuple(layer.gate.tree for layer in mixture_layers(network)))
        growth["after_growth"] = {"valid": measure([network], *valid)}
        if flops:
            growth["growth_flops"] = flops
        return network, grown, growth

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
        before = read_unfinished(unfinished)
        if before is not None and before.get("seeds") == seeds:  # with other seeds, the file belongs to other runs
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
                progress.update(epochs * per_epoch, loss, (epochs - done) * num_images / max(now - began, 1e-9))
                if now - saved >= self.save_every and not training.is_over:
                    write_checkpoint({**training.state_dict(), "seeds": seeds}, unfinished)
                    saved = time.monotonic()

    def _examples(self, rows: np.ndarray) -> Examples:
        images, labels = self._load(rows)
        return self.source.normalised(images), labels

    def _load(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return (uint8 images, labels) at indices ``rows`` of the stream, on the device."""
        images, labels = torch.from_numpy(self.stream.images[rows]), torch.from_numpy(self.stream.labels[rows])
        return images.to(self.settings.device), labels.to(self.settings.device)


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
        store = self.trainer.stores[self.folder.root]
        return bool(self.trains) and all(store.is_complete(each) for each in self.trains if model in (None, each))

    def run(self, work: StageWork) -> Mapping[str, Any]:
        return self.trainer.train(work, self.trainings) if self.trainings else self.trainer.test(work)
