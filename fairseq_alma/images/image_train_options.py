"""The options after ``--`` of alma-stream for images: those of fairseq-train that its own loop supports.

Defaults are those of the paper's study (Appendix B.1): a fully connected network and AdaDelta for MNIST and similar
data sets, a VGG network and SGD for CIFAR.
"""

from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Optional, Sequence

from fairseq_alma.checkpoints.model_options import IMAGE_NETWORKS, IMAGES, NETWORK, VGGVariantOptions
from fairseq_alma.learners.learner import Learner
from fairseq_alma.learners.presets import BOTH_STUDIES, MLP_STUDY, VGG_STUDY, Preset, filled
from fairseq_alma.options import (
    TRAINING,
    GivenOption,
    Option,
    Options,
    flags_of,
    group_words,
    integer,
    opt,
    options_of,
    real,
)
from fairseq_alma.training.feature import FEATURES
from fairseq_alma.watch.arrivals import CURVE_OPTIONS

OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "adadelta": ("--adadelta-rho", "--adadelta-eps", "--weight-decay"),
    "sgd": ("--momentum", "--weight-decay"),
    "adam": ("--adam-betas", "--adam-eps", "--weight-decay"),
}
"""Optimizers that treat each weight by itself, so that members side by side do not mix; and their options."""
MODEL_OPTIONS = (*NETWORK, *flags_of(VGGVariantOptions))


@dataclass(frozen=True)
class LoopOptions(Options):
    """Options of the training loop; fairseq-train does not have the last two. Epochs are those of one stage."""

    lr: Optional[float] = opt(
        None, "learning rate, the same for all epochs", range=real(0, above=True), kinds=IMAGES, metavar="X"
    )
    max_epoch: int = opt(int(BOTH_STUDIES["--max-epoch"]), "epochs of a stage", range=integer(1), kinds=IMAGES)
    batch_size: int = opt(int(BOTH_STUDIES["--batch-size"]), "images of an update", range=integer(1), kinds=IMAGES)
    patience: Optional[int] = opt(
        None, "stop after N epochs without an improvement (default: never)", range=integer(1), kinds=IMAGES
    )
    select: str = opt(
        "loss",
        "select the epoch of a stage by lowest validation loss or by best accuracy",
        choices=("loss", "accuracy"),
        kinds=IMAGES,
    )
    least_gain: float = opt(
        0.0,
        "smallest improvement that counts: nats, or a share of the images from 0 to 1",
        range=real(0, 1),
        kinds=IMAGES,
        metavar="X",
    )


OWN_OPTIONS = ("--select", "--least-gain")
TRAINING_OPTIONS = ("--optimizer", "--cpu", *flags_of(LoopOptions))


class ImageTrainOptions:
    """Options of a run on images, with the paper's where none are given.

    Args:
        words: the words after ``--``.
        learner: its class.
        for_photographs: whether the images are photographs, as CIFAR's, rather than digits.
        preset: values of options that are not given; None: the paper's.

    Attributes:
        overridden: options of the preset that were given with another value.

    Raises:
        ValueError: an option is unknown or out of range, or the learner cannot use the architecture.
    """

    def __init__(
        self, words: Sequence[str], learner: type[Learner], for_photographs: bool, preset: Optional[Preset] = None
    ) -> None:
        given = dict(group_words(words))
        self._refuse_unknown(given)
        study = VGG_STUDY if for_photographs else MLP_STUDY
        defaults = {"--arch": learner.image_architectures[for_photographs], **study, **BOTH_STUDIES}
        if "--optimizer" in given and given["--optimizer"] != (defaults["--optimizer"],):
            defaults = {name: defaults[name] for name in ("--arch", *BOTH_STUDIES)}
            if "--lr" not in given:
                raise ValueError(f"--optimizer {' '.join(given['--optimizer'])} after the --: give --lr too")
        defaults.update(learner.train_defaults)
        self.overridden: tuple[str, ...] = ()
        if preset is not None:
            arch = " ".join(given.get("--arch", (defaults["--arch"],)))
            said = preset.train_options(learner.name, arch)
            one_word = {name: " ".join(values) for name, values in given.items() if name in said}
            needed, overridden = filled(one_word, said)
            self.overridden = tuple(overridden)
            given = {**{name: (str(value),) for name, value in needed.items()}, **given}
        self.values = {**{name: (value,) for name, value in defaults.items()}, **given}
        self._check(learner)

    @property
    def arch(self) -> str:
        return self.values["--arch"][0]

    @property
    def loop(self) -> LoopOptions:
        return LoopOptions(**self.values_of(options_of(LoopOptions).values()))

    def as_dict(self) -> dict[str, str]:
        return {name: " ".join(values) for name, values in self.values.items()}

    def model_words(self) -> list[str]:
        """Return the options of the architecture, without its name."""
        return _flatten([option for option in self.values.items() if option[0] in MODEL_OPTIONS[1:]])

    def all_words(self) -> list[str]:
        """Return all as words for alma-stream."""
        return _flatten([*self.values.items()])

    def words(self) -> list[str]:
        """Return all that fairseq's parser of a training needs."""
        left_out = (*CURVE_OPTIONS, *OWN_OPTIONS, *feature_options())
        return _flatten([option for option in self.values.items() if option[0] not in left_out])

    def last(self, name: str) -> "tuple[str, ...] | None":
        return self.values.get(name)

    def values_of(self, options: Iterable[Option]) -> dict[str, Any]:
        """Return the given values of some options, by field name. Raises ValueError if one is out of range."""
        found = ((option, self.values[option.flag]) for option in options if option.flag in self.values)
        return {
            option.name: True if option.type is bool else option.value(" ".join(values)) for option, values in found
        }

    @staticmethod
    def _refuse_unknown(given: Mapping[str, tuple[str, ...]]) -> None:
        of_optimizers = {name for names in OPTIMIZERS.values() for name in names}
        known = {*MODEL_OPTIONS, *TRAINING_OPTIONS, *CURVE_OPTIONS, *of_optimizers, *feature_options()}
        for name in given:
            if name not in known:
                raise ValueError(
                    f"{name} after the --: alma-stream trains on images by itself; choose from "
                    f"{', '.join(sorted(known))}, or use fairseq-train"
                )

    def _check(self, learner: type[Learner]) -> None:
        optimizer = " ".join(self.values["--optimizer"])
        if optimizer not in OPTIMIZERS:
            raise ValueError(f"--optimizer {optimizer} after the --: choose from {', '.join(OPTIMIZERS)}")
        if len(self.values["--arch"]) != 1:
            given = " ".join(("--arch", *self.values["--arch"]))
            raise ValueError(f"{given} after the --: one name is needed")
        prefix = learner.arch_prefix
        if prefix is not None and not self.arch.startswith(prefix):
            raise ValueError(f"--arch {self.arch}: --learner {learner.name} needs an architecture {prefix}_…")
        for name, instead in learner.owned.items():
            if any(self.values.get(name, ())):
                raise ValueError(f"{name} after the --: {instead}")
        own = [
            option for kind in (LoopOptions, *IMAGE_NETWORKS, VGGVariantOptions) for option in options_of(kind).values()
        ]
        self.values_of([*own, *feature_options().values()])  # checks them


def feature_options() -> dict[str, Option]:
    """Return the options of features that stand after ``--`` and support images, by flag."""
    return {
        option.flag: option
        for kind in FEATURES
        for option in options_of(kind).values()
        if option.side == TRAINING and "images" in option.kinds and option.flag not in kind.owned
    }


def _flatten(options: Sequence[GivenOption]) -> list[str]:
    return [word for name, values in options for word in (name, *values)]
