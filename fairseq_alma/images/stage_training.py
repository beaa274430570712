"""Train one network on the images of one stage, and select its best epoch by validation (paper v1, section 5).

Members that are not trained jointly have their own order of the images, best epoch and early stop, and get the same
weights as if trained alone.

Letters: N members, U units (a unit has its own best epoch: one member, or all members of a joint model), B images of a
batch, C channels, H and W height and width, K classes.
"""

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fairseq_alma.errors import AlmaError
from fairseq_alma.images.image_batches import TrainingImages, batch_sizes
from fairseq_alma.images.image_train_options import LoopOptions
from fairseq_alma.images.networks import ImageNetwork, join_logits, load_exactly, member_logits
from fairseq_alma.training.feature import Features

COUNTS = ("ntokens", "nsentences", "sample_size")
"""Counts in the logs of fairseq's criterions: here the images of an update, over all members."""
ROUNDING = 1e-9  # of a difference between two accuracies


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(LoopOptions):
    """Settings of the training loop; joint members are trained as one model on the ``mean`` or ``sum`` of logits."""

    build_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    is_joint: bool = False
    joint_logits: str = "mean"

    def is_better(self, score: float, best: float) -> bool:
        """Return whether a score is lower than the best one by the least gain."""
        return score < best and score <= best - self.least_gain + ROUNDING


@dataclass
class UnitProgress:
    """Progress of one unit."""

    best_loss: float = math.inf  # lowest validation loss, in nats; with selection by accuracy the error, 0 to 1
    best_epoch: int = 0  # its epoch, from 1
    stopped_after: Optional[int] = None  # epochs until the early stop; None: still in training


class StageTraining:
    """One training; `state_dict` can resume it after any epoch.

    Args:
        network: with its initial weights, on its device.
        data: training images.
        valid_images: (B, C, H, W), normalized.
        valid_labels: (B) int64.
        settings: of the training loop.
        generators: of the order and crops of each member, on the CPU; one for a joint model.
        features: of the training.
        copy: features of a copy that is tested, while the next stage starts from the weights of the training itself;
            None: no copy.
        copy_from: first update of the copy that differs; the copy starts with the epoch of this update.

    Attributes:
        best: weights of the best epoch of each unit.
        tested: weights to test instead, of each unit; None: those of the best epoch.
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
        self.optimizer = settings.build_optimizer(list(network.parameters()))
        self.epoch = 0
        self.updates_per_epoch = len(batch_sizes(data.num_images, settings.batch_size))
        self.states = [network.state_dict()] if settings.is_joint else network.member_states()  # views
        self.best = [{name: tensor.clone() for name, tensor in state.items()} for state in self.states]
        self.tested: list[Optional[dict[str, Tensor]]] = [None] * len(self.states)
        self.units = [UnitProgress() for _ in self.states]
        self._fork_epoch = copy_from // self.updates_per_epoch
        self._fork: Optional[dict[str, Any]] = None  # state at the start of the copy
        self._trunk: Optional[list[dict[str, Tensor]]] = None  # best weights before the copy, once it is in training

    @property
    def is_over(self) -> bool:
        """Whether all units and the copy are trained."""
        return self._is_part_over and (self.copy is None or self._trunk is not None)

    @property
    def _is_part_over(self) -> bool:
        return self.epoch >= self.settings.max_epoch or all(unit.stopped_after is not None for unit in self.units)

    @property
    def num_epochs(self) -> tuple[int, int]:
        """Completed epochs and maximal number of epochs, including the copy."""
        of_copy = self.settings.max_epoch - self._fork_epoch if self.copy is not None else 0
        return self.epoch + (0 if self._trunk is None else of_copy), self.settings.max_epoch + of_copy

    def epochs_of(self, unit: int) -> int:
        """Return the number of epochs until the end or early stop of a unit."""
        stopped = self.units[unit].stopped_after
        return self.epoch if stopped is None else stopped

    def run_epoch(self) -> Tensor:
        """Train for an epoch and keep the weights of the best epoch. Return the mean loss of the last update, nats."""
        if self._is_part_over:  # return to the state at the start of the copy, and train the copy
            assert self.copy is not None and self._fork is not None
            self.load_state_dict({**self._fork, "trunk": deepcopy(self.best)})
        if self.copy is not None and self._trunk is None and self.epoch == self._fork_epoch:
            self._fork = deepcopy(self.state_dict())
        self.network.train()
        batches = self.data.epoch(self.settings.batch_size, self.generators)
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
        """Load the weights of the best epoch of each unit; the next stage starts from them."""
        if self._trunk is not None:
            self.tested = [*self.best]
        for state, best in zip(self.states, self._trunk or self.best, strict=True):
            load_exactly(state, best)

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
        """Resume from a `state_dict`; raises errors of several types if it belongs to another training."""
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
        """Return the sum over the units of their mean cross entropy, so that each unit gets its own gradient."""
        if self.settings.is_joint:
            shared = images[0] if images.dim() == 5 else images
            logits = join_logits(self.network(shared, self.generators), self.settings.joint_logits)
            return F.cross_entropy(logits.float(), labels[0])
        logits = self.network(images, self.generators)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / labels.size(1)

    def _select(self) -> None:
        """Validate, keep the weights of units with a better score, and stop units without patience left."""
        with self.features.around_forward(self.network):
            scores = validation_scores(self.network, self.valid_images, self.valid_labels, self.settings)
        own: Optional[Mapping[str, Tensor]] = None
        patience = math.inf if self.settings.patience is None else self.settings.patience
        for number, (unit, score, state) in enumerate(zip(self.units, scores, self.states, strict=True)):
            if unit.stopped_after is not None:
                continue
            if self.settings.is_better(score, unit.best_loss):
                unit.best_loss, unit.best_epoch = score, self.epoch
                load_exactly(self.best[number], state)
                own = self.features.to_test(self.network) if own is None else own
                if own is not None:
                    mine = own if self.settings.is_joint else self.network.part_of(own, number)
                    self.tested[number] = self.best[number] | {name: tensor.clone() for name, tensor in mine.items()}
                continue
            is_out_of_patience = self.epoch - unit.best_epoch >= patience
            if not unit.best_epoch and (is_out_of_patience or self.epoch == self.settings.max_epoch):
                raise AlmaError(
                    f"training diverged: the validation loss is {score} after {self.epoch} epochs; start a new --run "
                    "with a lower --lr"
                )
            if is_out_of_patience:
                unit.stopped_after = self.epoch


@torch.no_grad()
def validation_scores(network: nn.Module, images: Tensor, labels: Tensor, settings: TrainingSettings) -> list[float]:
    """Return the score of each unit that selects its epoch: mean cross entropy in nats, or error from 0 to 1.

    The error is NaN if a logit is not finite.
    """
    logits = member_logits(network, images).float()
    if settings.is_joint:
        logits = join_logits(logits, settings.joint_logits)[None]
    if settings.select == "accuracy":
        errors = (logits.argmax(dim=-1) != labels).double().mean(dim=1)
        return errors.where(logits.isfinite().all(dim=2).all(dim=1), torch.nan).tolist()
    return torch.stack([F.cross_entropy(each, labels) for each in logits]).tolist()
