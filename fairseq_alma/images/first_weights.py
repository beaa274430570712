"""The network that a stage starts from: new, or as the stage before has left it, grown if the learner grows."""

from dataclasses import dataclass
from typing import Any, Callable, Mapping, Optional, Sequence

import torch

from fairseq_alma.images.image_classifier import GrownLayers, GrowthData
from fairseq_alma.images.image_network import ImageNetwork
from fairseq_alma.images.image_settings import ImageSettings
from fairseq_alma.images.model_store import ModelStore, build_network
from fairseq_alma.images.predictions import Examples, measure
from fairseq_alma.images.stage_images import GROWTH, INITIAL_WEIGHTS, PERTURBATION, seeded
from fairseq_alma.learners.plan import StagePlan, Training, member_seed

GROWTH_FLOPS = "growth_flops"
"""Key in stage.json: the part of train_flops that Firefly's growth step took."""
Group = Sequence[tuple[ModelStore, Training]]
"""What is trained side by side, each with the models of its run."""


@dataclass(frozen=True)
class Start:
    """What a stage starts from.

    Attributes:
        network: on the run's device.
        grown: what growth has changed up to now.
        growth: what stage.json says of the growth step before this stage; empty without one.
    """

    network: ImageNetwork
    grown: GrownLayers
    growth: Mapping[str, Any]


def start_stage(
    plan: StagePlan,
    group: Group,
    settings: ImageSettings,
    examples: Callable[[], Examples],
    valid: Examples,
    shrink_perturb: Optional[float] = None,
) -> Start:
    """Return what a stage starts from.

    Args:
        plan: of the stage.
        group: what is trained; the first of it is the plan's.
        settings: of the run.
        examples: returns the stage's training examples.
        valid: the stage's validation examples.
        shrink_perturb: see `StageEnds`.
    """
    first = group[0][1]
    if first.start is None:
        initial = [training.seed for _, training in group]
        if settings.is_joint:
            initial = [member_seed(first.seed, member) for member in range(settings.num_joint)]
        network = settings.build(len(initial))
        network.reset_parameters([seeded(seed, INITIAL_WEIGHTS) for seed in initial])
        return Start(network.to(settings.device), settings.grown_layers(network), {})
    before = [models[training.start] for models, training in group if training.start is not None]
    network = build_network(settings, before)
    if shrink_perturb is not None:
        drawn = [(training.seed, plan.stage.index) for _, training in group]
        if settings.is_joint:
            drawn = [(member_seed(first.seed, member), plan.stage.index) for member in range(settings.num_joint)]
        _perturb(network, settings.build(len(drawn)), drawn, shrink_perturb)
    if first.growth is None:
        return Start(network, before[0].grown, {})
    generator = seeded(first.growth.seed, plan.stage.index, GROWTH)
    before_growth = {"valid": measure(network, *valid)}
    data = GrowthData(examples, valid, settings.training().batch_size)
    network, flops = settings.model_class.grow(network, first.growth, settings.cfg.model, data, generator)
    figures: dict[str, Any] = {"before_growth": before_growth, "after_growth": {"valid": measure(network, *valid)}}
    return Start(network, settings.grown_layers(network), figures | ({GROWTH_FLOPS: flops} if flops else {}))


@torch.no_grad()
def _perturb(network: ImageNetwork, fresh: ImageNetwork, drawn: Sequence[tuple[int, int]], share: float) -> None:
    """Keep a share of each weight; the rest is an initial weight, drawn from each member's seed and the stage."""
    fresh.reset_parameters([seeded(*numbers, PERTURBATION) for numbers in drawn])
    for old, new in zip(network.parameters(), fresh.parameters(), strict=True):
        old.mul_(share).add_(new.to(old.device), alpha=1 - share)
