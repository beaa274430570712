"""Presets for the image study: settings of the paper's text (``paper``) or of the released code (``released-code``).

Options on the command line take precedence over the preset, and run.json records the name of the preset. Sources: the
paper (v1, section 5; v5, sections 4 and 5 and Appendix B.1), and github.com/facebookresearch/alma.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any, Mapping, Optional

MLP_STUDY: Mapping[str, str] = {"--optimizer": "adadelta", "--lr": "1.0"}
VGG_STUDY: Mapping[str, str] = {"--optimizer": "sgd", "--lr": "0.01", "--momentum": "0.9", "--weight-decay": "0.0001"}
BOTH_STUDIES: Mapping[str, str] = {"--max-epoch": "100", "--batch-size": "128"}


@dataclass(frozen=True)
class Preset:
    """Option values that a preset sets. The value None means that the preset omits the option.

    Attributes:
        learners: learner -> (field name -> value) for the options of the learner.
        training: options after ``--`` for all learners and networks.
        own_training: learner -> options after ``--`` for this learner.
        vgg: options after ``--`` for VGG networks.
    """

    name: str
    learners: Mapping[str, Mapping[str, Optional[str]]]
    training: Mapping[str, Optional[str]]
    own_training: Mapping[str, Mapping[str, Optional[str]]] = field(default_factory=dict)
    vgg: Mapping[str, Optional[str]] = field(default_factory=dict)


PAPER = Preset(  # selects the epoch with the lowest validation loss; no early stopping
    "paper",
    learners={
        "gens": {"init": "scratch", "combine": "probabilities"},
        "umix": {"joint_logits": "mean"},
        "firefly": {"grow_share_of": "parameters"},
    },
    training={"--select": "loss", "--least-gain": "0", "--patience": None},
    vgg={"--last-pool": "mean", "--initial-weights": "he"},
)
RELEASED_CODE = Preset(  # selects the epoch with the best validation accuracy; early stopping with a patience of 25
    "released-code",
    learners={
        "gens": {"init": "previous", "combine": "logits"},
        "umix": {"joint_logits": "sum"},
        "firefly": {"grow_share_of": "neurons"},
    },
    training={"--select": "accuracy", "--least-gain": "0.001", "--patience": "25"},
    # k_ensemble.py, agg_ensemble.py and bagging.py have no minimum improvement. k_ensemble.py, agg_ensemble.py and the
    # fixed mixture train for 100 epochs with a patience of 100, so they never stop early. bagging.py has no patience.
    own_training={
        **{name: {"--least-gain": "0", "--patience": None} for name in ("ens", "umix", "bagging")},
        "moe": {"--patience": None},
    },
    vgg={"--last-pool": "max", "--initial-weights": "default"},
)
PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in (PAPER, RELEASED_CODE)}


_DEFAULTS = {
    **PAPER.training, **PAPER.vgg, **{name: value for each in PAPER.learners.values() for name, value in each.items()},
}  # fmt: skip
"""Values that `with_preset` omits, so that the ``paper`` preset does not change the options in run.json."""


def canonical(value: Any) -> Any:
    """Return the value of an option, converted to float if possible, so that ``0.01`` equals ``1e-2``."""
    with contextlib.suppress(TypeError, ValueError):
        return float(value)
    return value


def with_preset(given: Mapping[str, Any], preset: Mapping[str, Optional[Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return (options of the user and a preset, names of preset options that the user set to other values).

    Options of the user take precedence. The result omits values of the preset that equal the package's defaults.
    """
    overridden = [name for name in preset if name in given and canonical(given[name]) != canonical(preset[name])]
    needed = {name: value for name, value in preset.items() if value != _DEFAULTS.get(name)}
    return {**needed, **given}, overridden
