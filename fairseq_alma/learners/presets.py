"""Presets for the image study: the paper's text, and its released code where it differs.

An option that the user gives takes precedence; run.json names the preset. Sources: the paper (v1, section 5; v5,
sections 4 and 5 and Appendix B.1); github.com/facebookresearch/alma, its configurations and learners.
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
        name: value of ``--preset``.
        learners: learner -> values of its own options, by field name.
        training: options after ``--``.
        own_training: learner -> its differences from ``training``.
        vgg: further options after ``--`` of VGG networks.
    """

    name: str
    learners: Mapping[str, Mapping[str, Optional[str]]]
    training: Mapping[str, Optional[str]]
    own_training: Mapping[str, Mapping[str, Optional[str]]] = field(default_factory=dict)
    vgg: Mapping[str, Optional[str]] = field(default_factory=dict)

    def train_options(self, learner: str, arch: str) -> dict[str, Optional[str]]:
        """Return the options after ``--``."""
        vgg = self.vgg if "vgg" in arch else {}
        return {**self.training, **self.own_training.get(learner, {}), **vgg}


PAPER = Preset(  # lowest validation loss, no early stop
    "paper",
    learners={
        "gens": {"init": "scratch", "combine": "probabilities"},
        "umix": {"joint_logits": "mean"},
        "firefly": {"grow_share_of": "parameters"},
    },
    training={"--select": "loss", "--least-gain": "0", "--patience": None},
    vgg={"--last-pool": "mean", "--initial-weights": "he"},
)
RELEASED_CODE = Preset(  # best validation accuracy, an early stop after 25 epochs without a better one
    "released-code",
    learners={
        "gens": {"init": "previous", "combine": "logits"},
        "umix": {"joint_logits": "sum"},
        "firefly": {"grow_share_of": "neurons"},
    },
    training={"--select": "accuracy", "--least-gain": "0.001", "--patience": "25"},
    # k_ensemble.py, agg_ensemble.py and bagging.py accept any gain. The configurations of the first two and of the
    # fixed mixture have a patience of 100 in 100 epochs, which never stops; bagging.py has no early stop.
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
"""Values that run.json omits, so that a run with the paper's preset is the same run as one without a preset."""


def canonical(value: Any) -> Any:
    """Return the value of an option, numbers as floats, so that ``0.01`` equals ``1e-2``."""
    with contextlib.suppress(TypeError, ValueError):
        return float(value)
    return value


def filled(given: Mapping[str, Any], preset: Mapping[str, Optional[Any]]) -> tuple[dict[str, Any], list[str]]:
    """Add the values of a preset to the given options.

    Args:
        given: option -> value of the user.
        preset: option -> value of the preset.

    Returns:
        All options; the names of those that the user gave with another value.
    """
    overridden = [
        name for name, value in preset.items() if name in given and canonical(given[name]) != canonical(value)
    ]
    needed = {name: value for name, value in preset.items() if value != _DEFAULTS.get(name)}
    return {**needed, **given}, overridden
