"""Predictions of one or several models: mean of probabilities, mean of logits, or majority vote.

In a growing ensemble, each model predicts the test set once; later stages reuse the sum of predictions.

Letters in shapes: N models, B images, K classes.
"""

from pathlib import Path
from typing import Any, Optional, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_alma.files import open_atomically
from fairseq_alma.images.image_classifier import Examples
from fairseq_alma.images.mixtures import mixture_layers
from fairseq_alma.images.model_store import ModelStore
from fairseq_alma.images.networks import ImageNetwork, in_chunks, join_logits
from fairseq_alma.learners.learner import ModelId, StagePlan

EXPERTS_FILE = "test-experts.npz"
NUM_SHOWN = 2000
Metrics = dict[str, float]


class Tally:
    """Combined predictions of several models for the same images.

    Add the models in a fixed order, so that sums are bit-identical after a restart.

    Args:
        combine: how the class is predicted: ``single`` or ``probabilities`` (largest mean probability), ``logits``
            (largest mean logit), or ``vote`` (most votes; ties: largest mean probability).
    """

    def __init__(self, combine: str) -> None:
        self.combine = combine
        self.num_models = 0
        self.log_sum: Optional[Tensor] = None  # sum of logits for "logits", else log of summed probabilities
        self.votes: Optional[Tensor] = None

    def add(self, logits: Tensor) -> None:
        """Add the logits (N, B, K) of N more models."""
        self.num_models += len(logits)
        for each in logits if self.combine == "logits" else F.log_softmax(logits, dim=-1):
            add = torch.add if self.combine == "logits" else torch.logaddexp
            self.log_sum = each if self.log_sum is None else add(self.log_sum, each)
            if self.combine == "vote":
                vote = F.one_hot(each.argmax(dim=-1), logits.size(-1))
                self.votes = vote if self.votes is None else self.votes + vote

    def result(self, labels: Tensor) -> Metrics:
        """Return ``loss`` (nats) and ``error`` (0 to 1) of the combined predictions for labels (B)."""
        assert self.log_sum is not None  # at least one model was added
        if self.combine == "logits":
            log_probs = F.log_softmax(self.log_sum / self.num_models, dim=-1)
        else:
            log_probs = self.log_sum - torch.log(torch.tensor(float(self.num_models)))
        # Half of a mean probability is less than one vote, so probabilities only break ties.
        scores = log_probs if self.votes is None else self.votes + log_probs.exp() / 2
        wrong = (scores.argmax(dim=-1) != labels).sum().item()
        return {"loss": F.nll_loss(log_probs, labels).item(), "error": wrong / len(labels)}


@torch.no_grad()
def predict(
    network: ImageNetwork, images: Tensor, joint_logits: Optional[str] = None
) -> tuple[Tensor, list[list[float]]]:
    """Return predictions for normalized images (B, C, H, W).

    Args:
        network: network of N members.
        images: normalized images.
        joint_logits: how the logits of a joint model's members are combined: ``mean`` or ``sum``; None: no joint model.

    Returns:
        (logits (N, B, K), or (1, B, K) for a joint model; share of the images that are assigned to each expert, for
        each mixture layer).
    """
    network.eval()
    layers = mixture_layers(network)
    totals: list[Tensor] = [torch.zeros(layer.num_experts, device=images.device) for layer in layers]
    parts = []
    for some in in_chunks(images):
        logits = network(some)
        parts.append(logits if joint_logits is None else join_logits(logits, joint_logits)[None])
        totals = [total + layer.shares().sum(dim=0) for total, layer in zip(totals, layers, strict=True)]
    usage = [[round(share, 4) for share in (total / len(images)).tolist()] for total in totals]
    return torch.cat(parts, dim=1), usage


def measure(network: ImageNetwork, images: Tensor, labels: Tensor) -> Metrics:
    """Return ``loss`` (nats) and ``error`` (0 to 1) of a network of one member."""
    tally = Tally("single")
    tally.add(predict(network, images)[0])
    return tally.result(labels)


@torch.no_grad()
def write_experts(folder: Path, network: ImageNetwork, examples: Examples) -> None:
    """Write the expert that each mixture layer selects for the first `NUM_SHOWN` test images, as data for a figure.

    The file contains the arrays ``features`` (n, d) (input of the first gate), ``labels`` (n) and ``expert``
    (layers, n). Without mixture layers, the function writes no file.
    """
    layers = mixture_layers(network)
    if not layers:
        return
    images, labels = examples
    network.eval()
    network(images[:NUM_SHOWN])
    features = layers[0].gate_input
    assert features is not None
    experts = torch.stack([layer.shares().argmax(dim=-1) for layer in layers])
    arrays: dict[str, Any] = {"features": features, "labels": labels[:NUM_SHOWN], "expert": experts}
    arrays = {name: tensor.cpu().numpy() for name, tensor in arrays.items()}
    with open_atomically(folder / EXPERTS_FILE) as file:
        np.savez_compressed(file, **arrays)


class Predictions:
    """Predictions of one run's models on the test set ``test`` and on validation sets."""

    def __init__(self, store: ModelStore, test: Examples) -> None:
        self.network_of, self.test = store.network_of, test
        self.joint_logits = store.settings.joint_logits if store.settings.is_joint else None
        self._tally = Tally("single")
        self._counted: list[ModelId] = []
        self._frozen: dict[ModelId, ImageNetwork] = {}

    def on_test(self, plan: StagePlan) -> tuple[Metrics, list[list[float]]]:
        """Return (loss and error on the test set, share of images per expert in the last network; see `predict`)."""
        can_extend = self._counted and self._counted == list(plan.predictors[: len(self._counted)])
        if not can_extend or plan.combine == "single":
            self._tally, self._counted = Tally(plan.combine), []
        usage: list[list[float]] = []
        for models in _groups(plan, plan.predictors[len(self._counted) :]):
            logits, usage = predict(self.network_of(models), self.test[0], self.joint_logits)
            self._tally.add(logits)
            self._counted += models
        return self._tally.result(self.test[1]), usage

    def on_valid(self, plan: StagePlan, valid: Examples) -> Metrics:
        """Return loss and error on the validation set of the stage."""
        tally = Tally(plan.combine)
        self._frozen = {model: network for model, network in self._frozen.items() if model in plan.predictors}
        for models in _groups(plan, plan.predictors):
            network = self._frozen.get(models[0]) or self.network_of(models)
            if plan.stage.index != models[0].stage:
                self._frozen[models[0]] = network
            tally.add(predict(network, valid[0], self.joint_logits)[0])
        return tally.result(valid[1])


def _groups(plan: StagePlan, models: Sequence[ModelId]) -> list[list[ModelId]]:
    """Group models by network: one network for each model of an earlier stage, and one for all models of the stage."""
    new = {training.model for training in plan.trainings}
    groups = [[model] for model in models if model not in new]
    together = [model for model in models if model in new]
    return [*groups, together] if together else groups
