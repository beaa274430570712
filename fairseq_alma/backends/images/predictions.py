"""Tests what predicts after a stage, and remembers what frozen models predict.

A growing ensemble has as many models as stages before; all but the new ones predict what they predicted before.
"""

from pathlib import Path
from typing import Callable, Optional, Sequence

import numpy as np
import torch
from torch import Tensor

from fairseq_alma.backends.images.stage_training import CHUNK
from fairseq_alma.backends.images.tally import Tally
from fairseq_alma.learners.plan import Model, StagePlan
from fairseq_alma.modules.images.image_network import ImageNetwork
from fairseq_alma.modules.images.mixtures import mixture_layers

EXPERTS_FILE = "test-experts.npz"
NUM_SHOWN = 2000
NetworkOf = Callable[[Sequence[Model]], ImageNetwork]


class Predictions:
    """Predictions for the test set of a stream.

    Args:
        images: (B, C, H, W), normalised.
        labels: (B) int64.

    Attributes:
        usage: of the last network with mixtures, for each layer the shares of the test images of each expert.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels
        self.usage: list[list[float]] = []
        self.tally = Tally("single")
        self.counted: list[Model] = []
        self.network: Optional[ImageNetwork] = None
        self.networks: dict[Model, ImageNetwork] = {}

    def on_test(self, plan: StagePlan, network_of: NetworkOf, is_joint: bool) -> dict[str, float]:
        """Return loss (nats) and error (0 to 1) on the test set."""
        is_longer = self.counted and self.counted == list(plan.predictors[: len(self.counted)])
        if not is_longer or plan.combine == "single":
            self.tally, self.counted = Tally(plan.combine), []
        for models in self._groups(plan, plan.predictors[len(self.counted) :]):
            self.tally.add(self._logits(network_of(models), self.images, is_joint))
            self.counted += models
        return self.tally.result(self.labels)

    def on_valid(
        self, plan: StagePlan, network_of: NetworkOf, is_joint: bool, images: Tensor, labels: Tensor
    ) -> dict[str, float]:
        """Return loss and error on the stage's validation set."""
        tally = Tally(plan.combine)
        known = set(plan.predictors)
        self.networks = {model: network for model, network in self.networks.items() if model in known}
        for models in self._groups(plan, plan.predictors):
            if plan.stage.index == models[0].stage:
                network = network_of(models)
            else:
                network = self.networks.setdefault(models[0], self.networks.get(models[0]) or network_of(models))
            tally.add(self._logits(network, images, is_joint))
        return tally.result(labels)

    def measure(self, network: ImageNetwork, images: Tensor, labels: Tensor) -> dict[str, float]:
        """Return loss and error of a network of one member."""
        tally = Tally("single")
        tally.add(self._logits(network, images, is_joint=False))
        return tally.result(labels)

    @torch.no_grad()
    def write_experts(self, folder: Path) -> None:
        """Write which expert each of the first test images goes to, for a picture; nothing without mixtures.

        ``test-experts.npz`` has ``features`` (n, d), what the first layer's gate sees, ``labels`` (n) and ``expert``
        (layers, n).
        """
        layers = mixture_layers(self.network) if self.network is not None else []
        if not layers or self.network is None:
            return
        self.network.eval()
        self.network(self.images[:NUM_SHOWN])
        features = layers[0].gate_input
        assert features is not None
        experts = torch.stack([layer.shares().argmax(dim=-1) for layer in layers])
        np.savez_compressed(
            folder / EXPERTS_FILE,
            features=features.cpu().numpy(),
            labels=self.labels[:NUM_SHOWN].cpu().numpy(),
            expert=experts.cpu().numpy(),
        )

    @torch.no_grad()
    def _logits(self, network: ImageNetwork, images: Tensor, is_joint: bool) -> Tensor:
        """Return (N, B, K) logits, of a joint network (1, B, K); notes the use of experts."""
        network.eval()
        layers = mixture_layers(network)
        totals: list[Tensor] = [torch.zeros(layer.num_experts, device=images.device) for layer in layers]
        parts = []
        for some in images.split(CHUNK):
            logits = network(some)
            parts.append(logits.mean(dim=0, keepdim=True) if is_joint else logits)
            totals = [total + layer.shares().sum(dim=0) for total, layer in zip(totals, layers, strict=True)]
        self.usage = [[round(share, 4) for share in (total / len(images)).tolist()] for total in totals]
        self.network = network
        return torch.cat(parts, dim=1)

    @staticmethod
    def _groups(plan: StagePlan, models: Sequence[Model]) -> list[list[Model]]:
        """Put the models that the stage trained into one group, computed together; each other stands alone."""
        new = {training.model for training in plan.trainings}
        groups = [[model] for model in models if model not in new]
        together = [model for model in models if model in new]
        return [*groups, together] if together else groups
