"""Trains one network on the images of one stage: all epochs, best epoch by validation (paper v1, section 5).

Unless members are trained jointly, each has its own order of the images, its own best epoch and its own early stop, and
ends with the weights that it would have if trained alone. Random choices are also here: generators, rows, batches in
each member's order, crops and flips.

Letters: N members, U units (each with a best epoch of its own: a member, or all members together if they are joint),
B images of a batch, S images of an epoch, C channels, H and W height and width, K classes.
"""

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.errors import AlmaError
from fairseq_alma.images.image_train_options import LoopOptions
from fairseq_alma.images.networks import ImageNetwork, join_logits, load_exactly, member_logits, member_states
from fairseq_alma.training.feature import Features

INITIAL_WEIGHTS, ORDER, BOOTSTRAP, GROWTH = range(4)
PADDING = 4


def seeded(*numbers: int) -> torch.Generator:
    """Return a generator on the CPU, seeded by its purpose, so that nothing depends on what ran before."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)


def rows_to_train_on(
    stream: ImageStream, megabatches: Sequence[int], wait: int, features: Features, seed: int
) -> np.ndarray:
    """Return the indices of a stage's training images, after those of earlier stages that a feature draws.

    ``wait`` is the number of mega-batches of each earlier stage.
    """
    new = stream.train_indices(megabatches)
    if not features.draws_earlier:
        return new
    before = [range(first, first + wait) for first in range(0, megabatches[0], wait)]
    each = [[stream.train_indices([t]) for t in stage] for stage in (*before, megabatches)]
    drawn = features.draw_earlier([[len(rows) for rows in stage] for stage in each], seed)
    if drawn is None:
        return new
    return np.concatenate([np.concatenate([rows for stage in each[:-1] for rows in stage])[drawn], new])


class ImageInput:
    """Turns bytes into what networks take.

    Args:
        mean: of each channel over the training images of the data set, in units 0 to 1.
        std: of each channel, as mean.
        augment: in training, crop at random after padding by 4 black pixels, and flip every second image sideways.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], augment: bool) -> None:
        self.augment = augment
        self.mean = 255 * torch.tensor(mean)[:, None, None]
        self.std = 255 * torch.tensor(std)[:, None, None]

    def to(self, device: torch.device) -> "ImageInput":
        self.mean, self.std = self.mean.to(device), self.std.to(device)
        return self

    def normalised(self, images: Tensor) -> Tensor:
        """Return (..., C, H, W) bytes as floats of mean 0 and deviation 1 for each channel."""
        return (images.float() - self.mean) / self.std

    def augmented(self, images: Tensor, generator: Optional[Generator] = None) -> Tensor:
        """Crop and flip (B, C, H, W) bytes at random, then normalise; the generator of the choices is on the CPU."""
        batch, _, height, width = images.shape
        device = images.device
        drawn = torch.randint(2 * PADDING + 1, (2, batch, 1), generator=generator)
        flip = torch.rand(batch, 1, generator=generator) < 0.5
        rows = drawn[0] + torch.arange(height)  # (B, H)
        columns = drawn[1] + torch.where(flip, torch.arange(width - 1, -1, -1), torch.arange(width))  # (B, W)
        padded = F.pad(images, (PADDING,) * 4).permute(0, 2, 3, 1)  # (B, H, W, C), so that C stays together
        each = torch.arange(batch, device=device)[:, None, None]
        crops = padded[each, rows.to(device)[:, :, None], columns.to(device)[:, None]]
        return self.normalised(crops.permute(0, 3, 1, 2).contiguous())


class TrainingImages:
    """Training images of a stage, and what each member sees of them.

    Args:
        images: (n, C, H, W) bytes; they are normalised once unless they are cropped at random.
        labels: (n) int64.
        rows: for each member its (S) rows of ``images``, some of them several times in a bootstrap sample; None: each
            image once.
        source: crops, flips and normalises.
    """

    def __init__(self, images: Tensor, labels: Tensor, rows: Sequence[Optional[Tensor]], source: ImageInput) -> None:
        self.images = images if source.augment else source.normalised(images)
        self.labels, self.source = labels, source
        everything = torch.arange(len(labels))
        self.rows = [everything if own is None else own for own in rows]
        self.rows_are_shared = all(own is None for own in rows)

    @property
    def num_images(self) -> int:
        """S."""
        return len(self.rows[0])

    def epoch(self, batch_size: int, generators: Sequence[Generator]) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw the batches of one epoch, in an order of its own for each member, by its generator on the CPU.

        Yields:
            (N, B, C, H, W) images, or (B, C, H, W) that all members share, and (N, B) labels.
        """
        if self.num_images <= batch_size and not self.source.augment and self.rows_are_shared:  # no order to draw
            yield self.images, self.labels.expand(len(self.rows), -1)
            return
        orders = [
            rows[torch.randperm(len(rows), generator=one)] for rows, one in zip(self.rows, generators, strict=True)
        ]
        for batch in zip(*(order.split(self.sizes(batch_size)) for order in orders), strict=True):
            if self.source.augment:
                crops = [
                    self.source.augmented(self.images[rows], one) for rows, one in zip(batch, generators, strict=True)
                ]
                yield torch.stack(crops), self.labels[torch.stack(batch)]
            else:
                rows = torch.stack(batch)
                yield self.images[rows], self.labels[rows]

    def sizes(self, batch_size: int) -> list[int]:
        return batch_sizes(self.num_images, batch_size)


def batch_sizes(num_images: int, batch_size: int) -> list[int]:
    """Cut images into batches. A last image alone joins the batch before: batch norm needs more than one number."""
    full, rest = divmod(num_images, batch_size)
    sizes = [batch_size] * full + [rest] * (rest > 0)
    if rest == 1 and full:
        sizes[-2:] = [batch_size + 1]
    return sizes


def bootstrap(num_images: int, generator: Generator) -> Tensor:
    """Draw (S) rows of S images with replacement (Breiman 1996, bagging)."""
    return torch.randint(num_images, (num_images,), generator=generator)


PART = 65_536  # numbers: an optimizer's five tensors of 256 KiB stay in the cache of a core


class FlatParameters:
    """The parameters of a network and their gradients as parts of one tensor, so that an update is a few operations.

    With ten small tensors an optimizer spends most of its time on starting operations; parts that fit into a core's
    cache do not wait for memory. Optimizers that treat each number by itself (AdaDelta, SGD, Adam) give the same result
    for any parts. The network's own parameters become views: updating the parts updates the network.

    Args:
        network: on its device already; its parameters must not be replaced afterwards.

    Attributes:
        parts: what an optimizer is to update: of at most `PART` numbers on a CPU; on a GPU a single one.
    """

    def __init__(self, network: nn.Module) -> None:
        parameters = list(network.parameters())
        flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self._grad = torch.zeros_like(flat)
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            parameter.data = flat[start:end].view_as(parameter)
            parameter.grad = self._grad[start:end].view_as(parameter)
            start = end
        size = PART if flat.device.type == "cpu" else flat.numel()
        self.parts = [nn.Parameter(part) for part in flat.split(size)]
        for part, grad in zip(self.parts, self._grad.split(size), strict=True):
            part.grad = grad

    def zero_grad(self) -> None:
        self._grad.zero_()


COUNTS = ("ntokens", "nsentences", "sample_size")
"""What fairseq's criterions log of an update beside the loss: here its images, those of each member."""
ROUNDING = 1e-9  # of a difference between two shares
BuildOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(LoopOptions):
    """How a stage is trained.

    Attributes:
        build_optimizer: makes the optimizer of a list of parameters.
        is_joint: train the members as one.
        joint_logits: what these are trained on: the ``mean`` of their logits, or the ``sum``.
    """

    build_optimizer: BuildOptimizer
    is_joint: bool = False
    joint_logits: str = "mean"

    def is_better(self, score: float, best: float) -> bool:
        return score < best and score <= best - self.least_gain + ROUNDING


@dataclass
class UnitProgress:
    """How far one unit is.

    Attributes:
        best_loss: lowest validation loss so far, nats; where epochs are selected by accuracy, lowest error, 0 to 1.
        best_epoch: the epoch that had it, from 1.
        stopped_after: epochs that count; None: it is still trained.
    """

    best_loss: float = math.inf
    best_epoch: int = 0
    stopped_after: Optional[int] = None


class StageTraining:
    """One training; `state_dict` after any epoch is all that is needed to resume from there.

    Args:
        network: with the weights that it starts from, on its device.
        data: of the stage.
        valid_images: (B, C, H, W), normalised.
        valid_labels: (B) int64.
        settings: how to train.
        generators: of each member's order, crops and choices, on the CPU; a joint network has one.
        features: what it does beside learning.
        copy: the same of a copy, which is tested, while the next stage begins with the weights of the training itself;
            None: there is no copy.
        copy_from: the updates before which the copy differs in nothing. It branches off before their last epoch.

    Attributes:
        best: the weights of each unit's best epoch.
        tested: of each unit what is tested instead of these; None: they are.
    """

    def __init__(
        self,
        network: ImageNetwork,
        data: TrainingImages,
        valid_images: Tensor,
        valid_labels: Tensor,
        settings: TrainingSettings,
        generators: Sequence[Generator],
        features: Optional[Features] = None,
        copy: Optional[Features] = None,
        copy_from: int = 0,
    ) -> None:
        self.features, self.copy = features or Features(), copy
        self.network, self.data, self.settings = network, data, settings
        self.valid_images, self.valid_labels = valid_images, valid_labels
        self.generators = list(generators)
        self.parameters = FlatParameters(self.network)
        self.optimizer = settings.build_optimizer(self.parameters.parts)
        self.epoch = 0
        self.states = [network.state_dict()] if settings.is_joint else member_states(network)  # views
        self.best = [{name: tensor.clone() for name, tensor in state.items()} for state in self.states]
        self.tested: list[Optional[dict[str, Tensor]]] = [None] * len(self.states)
        self.units = [UnitProgress() for _ in self.states]
        self._fork_epoch = copy_from // self.updates_per_epoch
        self._fork: Optional[dict[str, Any]] = None  # what the copy begins with
        self._trunk: Optional[list[dict[str, Tensor]]] = None  # best weights of the training itself, if it is over

    @property
    def is_over(self) -> bool:
        """Whether no unit has an epoch left, nor the copy."""
        return self._is_part_over and (self.copy is None or self._trunk is not None)

    @property
    def _is_part_over(self) -> bool:
        return self.epoch >= self.settings.max_epoch or all(unit.stopped_after is not None for unit in self.units)

    @property
    def num_epochs(self) -> tuple[int, int]:
        """Epochs that were run, and how many these can become, the copy's with them."""
        of_copy = self.settings.max_epoch - self._fork_epoch if self.copy is not None else 0
        before = 0 if self._trunk is None else of_copy
        return self.epoch + before, self.settings.max_epoch + of_copy

    def epochs_of(self, unit: int) -> int:
        """Return the epochs that one unit was trained for."""
        stopped = self.units[unit].stopped_after
        return self.epoch if stopped is None else stopped

    @property
    def updates_per_epoch(self) -> int:
        return len(self.data.sizes(self.settings.batch_size))

    def run_epoch(self) -> Tensor:
        """Train for an epoch and note whether it is the best. Returns the last update's mean loss, nats."""
        if self._is_part_over:
            self._begin_copy()
        if self.copy is not None and self._trunk is None and self.epoch == self._fork_epoch:
            self._fork = deepcopy(self.state_dict())
        self.network.train()
        batches = self.data.epoch(self.settings.batch_size, self.generators)
        for update, (images, labels) in enumerate(batches, start=self.epoch * self.updates_per_epoch):
            self.parameters.zero_grad()
            with self.features.around_forward(self.network):
                loss = self._loss(images, labels)
            loss.backward()
            self.features.before_step(self.optimizer, update)
            self.optimizer.step()
            self.features.after_step(self.network, update)
            self.features.count([{"loss": loss.detach(), **dict.fromkeys(COUNTS, labels.numel())}])
        self.epoch += 1
        self._select()
        return loss.detach() / len(self.units)

    def finish(self) -> None:
        """Give the network the weights that the next stage begins with: those of each unit's best epoch."""
        if self._trunk is not None:
            self.tested = [*self.best]
        for state, best in zip(self.states, self._trunk or self.best, strict=True):
            load_exactly(state, best)

    def _begin_copy(self) -> None:
        """Go back to where the copy branches off, and train that from here on."""
        assert self.copy is not None and self._fork is not None
        trunk = deepcopy(self.best)
        self.load_state_dict({**self._fork, "trunk": trunk})

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changes during the training."""
        return {
            "epoch": self.epoch,
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generators": [generator.get_state() for generator in self.generators],
            "best": self.best,
            "tested": self.tested,
            "units": [vars(unit) for unit in self.units],
            "features": self.features.state_dict(),
            "fork": self._fork,
            "trunk": self._trunk,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`. Raises one of several errors if it is another training's."""
        load_exactly(self.network.state_dict(), state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        for generator, before in zip(self.generators, state["generators"], strict=True):
            generator.set_state(before)
        for best, before in zip(self.best, state["best"], strict=True):
            load_exactly(best, before)
        self.units = [UnitProgress(**unit) for unit in state["units"]]
        self.tested, self._fork, self._trunk = state["tested"], state["fork"], state["trunk"]
        if self.copy is not None and self._trunk is not None:
            self.features = self.copy
        self.features.load_state_dict(state["features"])
        self.epoch = state["epoch"]

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the sum over the units of the mean cross entropy, so that each gets its own gradient."""
        if self.settings.is_joint:
            shared = images[0] if images.dim() == 5 else images
            logits = join_logits(self.network(shared, self.generators), self.settings.joint_logits)
            return F.cross_entropy(logits.float(), labels[0])
        logits = self.network(images, self.generators)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / labels.size(1)

    def _select(self) -> None:
        """Keep the weights of the units for which this epoch is the best."""
        with self.features.around_forward(self.network):
            scores = validation_scores(self.network, self.valid_images, self.valid_labels, self.settings)
        own: Optional[Mapping[str, Tensor]] = None
        each = zip(self.units, scores, self.best, self.states, strict=True)
        for number, (unit, score, best, state) in enumerate(each):
            if unit.stopped_after is not None:
                continue
            if self.settings.is_better(score, unit.best_loss):
                unit.best_loss, unit.best_epoch = score, self.epoch
                load_exactly(best, state)
                own = self.features.to_test(self.network) if own is None else own
                self._keep_tested(number, own)
                continue
            is_out_of_patience = (
                self.settings.patience is not None and self.epoch - unit.best_epoch >= self.settings.patience
            )
            if not unit.best_epoch and (is_out_of_patience or self.epoch == self.settings.max_epoch):
                raise AlmaError(
                    f"the validation loss is {score} after {self.epoch} epochs, so the training diverged; start a new "
                    "--run with a lower --lr"
                )
            if is_out_of_patience:
                unit.stopped_after = self.epoch

    def _keep_tested(self, unit: int, own: Optional[Mapping[str, Tensor]]) -> None:
        """Keep what is tested of a unit instead of the weights of this epoch, if a feature says so."""
        if own is not None:
            own = own if self.settings.is_joint else self.network.part_of(own, unit)
            self.tested[unit] = self.best[unit] | {name: tensor.clone() for name, tensor in own.items()}


@torch.no_grad()
def validation_scores(network: nn.Module, images: Tensor, labels: Tensor, settings: TrainingSettings) -> list[float]:
    """Return for each unit what its epochs are selected by: the mean cross entropy in nats, or the error from 0 to 1.

    A unit whose logits are no numbers has no error: NaN.
    """
    logits = member_logits(network, images).float()
    if settings.is_joint:
        logits = join_logits(logits, settings.joint_logits)[None]
    if settings.select == "accuracy":
        errors = (logits.argmax(dim=-1) != labels).double().mean(dim=1)
        return errors.where(logits.isfinite().all(dim=2).all(dim=1), torch.nan).tolist()
    return torch.stack([F.cross_entropy(each, labels) for each in logits]).tolist()
