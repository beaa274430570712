"""Named settings of the image study: the paper's text, and its released code where that differs.

Both change the order of learners, so run.json names the preset. An option that the user gives takes precedence.
Sources: the paper (v1, section 5; v5, sections 4 and 5 and Appendix B.1); the released code,
github.com/facebookresearch/alma, its configurations for MNIST and CIFAR-10 and its folder of learners.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any, Mapping, Optional

MLP_STUDY: Mapping[str, str] = {"--optimizer": "adadelta", "--lr": "1.0"}
VGG_STUDY: Mapping[str, str] = {"--optimizer": "sgd", "--lr": "0.01", "--momentum": "0.9", "--weight-decay": "0.0001"}
BOTH_STUDIES: Mapping[str, str] = {"--max-epoch": "100", "--batch-size": "128"}


@dataclass(frozen=True)
class Preset:
    """Values of options; None: the option is not given.

    Attributes:
        name: of ``--preset``.
        help: its meaning.
        learners: name of a learner -> its own options, by their fields' names.
        training: options after ``--`` for every learner.
        own_training: name of a learner -> options after ``--`` that differ for it.
        vgg: further options after ``--`` for VGG networks.
    """

    name: str
    help: str
    learners: Mapping[str, Mapping[str, Optional[str]]]
    training: Mapping[str, Optional[str]]
    own_training: Mapping[str, Mapping[str, Optional[str]]] = field(default_factory=dict)
    vgg: Mapping[str, Optional[str]] = field(default_factory=dict)

    def learner_options(self, learner: str) -> Mapping[str, Optional[str]]:
        """Return the values of a learner's own options."""
        return self.learners.get(learner, {})

    def train_options(self, learner: str, arch: str) -> dict[str, Optional[str]]:
        """Return the values of options after ``--``."""
        vgg = self.vgg if "vgg" in arch else {}
        return {**self.training, **self.own_training.get(learner, {}), **vgg}


PAPER = Preset(
    "paper",
    "the paper's text: lowest validation loss, no early stop",
    learners={
        "gens": {"init": "scratch", "combine": "probabilities"},
        "umix": {"joint_logits": "mean"},
        "firefly": {"grow_share_of": "parameters"},
    },
    training={"--select": "loss", "--least-gain": "0", "--patience": None},
    vgg={"--last-pool": "mean", "--initial-weights": "he"},
)
RELEASED_CODE = Preset(
    "released-code",
    "the released code where it differs: best validation accuracy, an early stop after 25 epochs without a better "
    "one (of sm, gens, gmoe and firefly), and more",
    learners={
        "gens": {"init": "previous", "combine": "logits"},
        "umix": {"joint_logits": "sum"},
        "firefly": {"grow_share_of": "neurons"},
    },
    training={"--select": "accuracy", "--least-gain": "0.001", "--patience": "25"},
    # k_ensemble.py, agg_ensemble.py and bagging.py take any gain. A patience of 100 in 100 epochs, as the
    # configurations of the first two and of the fixed mixture have it, stops nothing, and bagging.py never stops.
    own_training={
        "ens": {"--least-gain": "0", "--patience": None},
        "umix": {"--least-gain": "0", "--patience": None},
        "bagging": {"--least-gain": "0", "--patience": None},
        "moe": {"--patience": None},
    },
    vgg={"--last-pool": "max", "--initial-weights": "default"},
)
PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in (PAPER, RELEASED_CODE)}


_DEFAULTS = {
    **PAPER.training, **PAPER.vgg, **{name: value for each in PAPER.learners.values() for name, value in each.items()},
}  # fmt: skip
"""Values that run.json omits, so that a run with the paper's preset and one without any are the same run."""


def canonical(value: Any) -> Any:
    """Return the value of an option such that numbers that are the same are equal: ``0.01`` and ``1e-2``."""
    with contextlib.suppress(TypeError, ValueError):
        return float(value)
    return value


def filled(given: Mapping[str, Any], preset: Mapping[str, Optional[Any]]) -> tuple[dict[str, Any], list[str]]:
    """Fill in the values of a preset.

    Args:
        given: option -> value, as the user gave them.
        preset: option -> value of the preset.

    Returns:
        The options with those of the preset that were not given; the names of those that were, with another value.
    """
    overridden = [
        name for name, value in preset.items() if name in given and canonical(given[name]) != canonical(value)
    ]
    needed = {name: value for name, value in preset.items() if value != _DEFAULTS.get(name)}
    return {**needed, **given}, overridden
