"""Training of one network on the images of one stage: batches, epochs, and selection of the best epoch.

The best epoch is selected by validation (paper v1, section 5). A *unit* is one member, or all members of a joint model.
Each unit has a separate image order, best epoch and early stopping, so a unit gets the same weights as in a separate
training run. A *branch* is a copy of the model that is trained with a decaying learning rate. If there is a branch, the
branch predicts on the test set; the next stage starts from the model without the decay.

Letters in shapes: N members, U units, B images in a batch, S images in an epoch, C channels, H height, W width, K
classes.
"""

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Iterator, Mapping, Optional, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.errors import AlmaError
from fairseq_alma.images.image_job import LoopOptions
from fairseq_alma.images.networks import ImageNetwork, in_chunks, load_exactly
from fairseq_alma.training.feature import Features

INITIAL_WEIGHTS, ORDER, BOOTSTRAP, GROWTH = range(4)
PADDING = 4
COUNTS = ("ntokens", "nsentences", "sample_size")
"""Keys in fairseq's logging outputs for the number of images in an update; N separate models count an image N times."""


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
        stopped = self.units[unit].stopped_after
        return self.epoch if stopped is None else stopped

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
            self.features.count([{"loss": loss.detach(), **dict.fromkeys(COUNTS, labels.numel())}])
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
        """Return the state of the training: weights, optimizer, random generators and progress."""
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
        """Return the sum of the units' mean cross entropies. With a sum, the gradients of the units are independent."""
        logits = self.network(images, self.generators)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / labels.size(1)

    def _select(self) -> None:
        """Validate, store weights of improved units, and stop units after ``patience`` epochs without improvement."""
        with self.features.around_forward(self.network):
            scores = validation_scores(self.network, self.valid_images, self.valid_labels, self.loop.select)
        own: Optional[Mapping[str, Tensor]] = None
        patience = math.inf if self.loop.patience is None else self.loop.patience
        for number, (unit, score, state) in enumerate(zip(self.units, scores, self.states, strict=True)):
            if unit.stopped_after is not None:
                continue
            if self.loop.is_better(score, unit.best_score):
                unit.best_score, unit.best_epoch = score, self.epoch
                load_exactly(self.best[number], state)
                own = self.features.to_test(self.network) if own is None else own
                if own is not None:
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
