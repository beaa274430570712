"""Options after ``--`` of alma-stream on images: the options of fairseq-train that the training loop supports.

The defaults are the settings of the paper (Appendix B.1). MNIST and similar data sets use a fully connected network and
AdaDelta; CIFAR uses a VGG network and SGD.
"""

from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Optional, Sequence

from fairseq_alma.checkpoints.model_options import IMAGE_NETWORKS, IMAGES, NETWORK, VGGVariantOptions
from fairseq_alma.learners.learner import Learner
from fairseq_alma.learners.presets import BOTH_STUDIES, MLP_STUDY, VGG_STUDY, Preset, with_preset
from fairseq_alma.options import TRAINING, Option, Options, flags_of, group_words, integer, opt, options_of, real
from fairseq_alma.training.feature import FEATURES
from fairseq_alma.watch.arrivals import CURVE_OPTIONS

OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "adadelta": ("--adadelta-rho", "--adadelta-eps", "--weight-decay"),
    "sgd": ("--momentum", "--weight-decay"),
    "adam": ("--adam-betas", "--adam-eps", "--weight-decay"),
}
"""Optimizer -> options of the optimizer.

These optimizers update each weight independently, so the members of a network do not affect each other.
"""
MODEL_OPTIONS = (*NETWORK, *flags_of(VGGVariantOptions))


@dataclass(frozen=True)
class LoopOptions(Options):
    """Options of the training loop, shared with fairseq-train except for ``--select`` and ``--least-gain``."""

    lr: Optional[float] = opt(
        None, "learning rate, constant over all epochs", range=real(0, above=True), kinds=IMAGES, metavar="X"
    )
    max_epoch: int = opt(
        int(BOTH_STUDIES["--max-epoch"]), "maximum number of epochs in each stage", range=integer(1), kinds=IMAGES
    )
    batch_size: int = opt(int(BOTH_STUDIES["--batch-size"]), "images per update", range=integer(1), kinds=IMAGES)
    patience: Optional[int] = opt(
        None, "stop a stage after N epochs without improvement (default: never)", range=integer(1), kinds=IMAGES
    )
    select: str = opt(
        "loss", "validation metric that selects the best epoch of a stage", choices=("loss", "accuracy"), kinds=IMAGES
    )
    least_gain: float = opt(
        0.0,
        "minimum improvement of the --select metric for a new best epoch (loss in nats, accuracy from 0 to 1)",
        range=real(0, 1),
        kinds=IMAGES,
        metavar="X",
    )


OWN_OPTIONS = ("--select", "--least-gain")
TRAINING_OPTIONS = ("--optimizer", "--cpu", *flags_of(LoopOptions))


class ImageTrainOptions:
    """Options after ``--`` of a run on images. Without a preset, the defaults are the settings of the paper.

    Args:
        words: command-line arguments after ``--``.
        learner: class of the learner.
        for_photographs: whether to use the paper's settings for CIFAR instead of the settings for MNIST.
        preset: preset that determines defaults; None: no preset.

    Attributes:
        values: option -> value, as command-line arguments.
        overridden: options whose value on the command line differs from the preset's value.
        arch: name of the architecture.
        loop: options of the training loop.

    Raises:
        ValueError: an option is unknown or out of range, or the learner does not support the architecture.
    """

    def __init__(
        self, words: Sequence[str], learner: type[Learner], for_photographs: bool, preset: Optional[Preset] = None
    ) -> None:
        given = dict(group_words(words))
        of_optimizers = [name for names in OPTIMIZERS.values() for name in names]
        known = {*MODEL_OPTIONS, *TRAINING_OPTIONS, *CURVE_OPTIONS, *of_optimizers, *feature_options()}
        for name in given:
            if name not in known:
                raise ValueError(
                    f"{name} after --: not supported on streams of images; choose from "
                    f"{', '.join(sorted(known))}; for other options, use fairseq-train"
                )
        study = VGG_STUDY if for_photographs else MLP_STUDY
        defaults = {"--arch": learner.image_architectures[for_photographs], **study, **BOTH_STUDIES}
        if "--optimizer" in given and given["--optimizer"] != (defaults["--optimizer"],):
            defaults = {name: defaults[name] for name in ("--arch", *BOTH_STUDIES)}
            if "--lr" not in given:
                raise ValueError(
                    f"--optimizer {' '.join(given['--optimizer'])} after --: requires a learning rate; give --lr"
                )
        defaults.update(learner.train_defaults)
        self.overridden: tuple[str, ...] = ()
        if preset is not None:
            arch = " ".join(given.get("--arch", (defaults["--arch"],)))
            own, of_vgg = preset.own_training.get(learner.name, {}), preset.vgg if "vgg" in arch else {}
            of_preset = {**preset.training, **own, **of_vgg}
            one_word = {name: " ".join(values) for name, values in given.items() if name in of_preset}
            needed, overridden = with_preset(one_word, of_preset)
            self.overridden = tuple(overridden)
            given = {**{name: (str(value),) for name, value in needed.items()}, **given}
        self.values = {**{name: (value,) for name, value in defaults.items()}, **given}

        optimizer = " ".join(self.values["--optimizer"])
        if optimizer not in OPTIMIZERS:
            raise ValueError(f"--optimizer {optimizer} after --: unknown; choose from {', '.join(OPTIMIZERS)}")
        if len(self.values["--arch"]) != 1:
            raise ValueError(
                f"{' '.join(('--arch', *self.values['--arch']))} after --: expected one architecture; give one name"
            )
        (self.arch,) = self.values["--arch"]
        prefix = learner.arch_prefix
        if prefix is not None and not self.arch.startswith(prefix):
            raise ValueError(f"--arch {self.arch}: --learner {learner.name} requires an architecture named {prefix}_…")
        for name, instead in learner.owned.items():
            if any(self.values.get(name, ())):
                raise ValueError(f"{name} after --: {instead}")
        self.loop = LoopOptions(**self.values_of(options_of(LoopOptions).values()))
        for kind in (*IMAGE_NETWORKS, VGGVariantOptions):
            self.values_of(options_of(kind).values())  # raises ValueError if a value is out of range
        self.values_of(feature_options().values())

    def words(self, names: Optional[Iterable[str]] = None) -> list[str]:
        """Return the options ``names`` (None: all options) as command-line arguments."""
        return [word for name in (self.values if names is None else names) for word in (name, *self.values[name])]

    def fairseq_words(self) -> list[str]:
        """Return the options that fairseq-train supports, as command-line arguments."""
        others = {*CURVE_OPTIONS, *OWN_OPTIONS, *feature_options()}
        return self.words(name for name in self.values if name not in others)

    def values_of(self, options: Iterable[Option]) -> dict[str, Any]:
        """Return the values of ``options`` by field name. Omit options that have neither a value nor a default.

        Raises:
            ValueError: a value is out of range.
        """
        found = ((option, self.values[option.flag]) for option in options if option.flag in self.values)
        return {
            option.name: True if option.type is bool else option.value(" ".join(values)) for option, values in found
        }


def feature_options() -> dict[str, Option]:
    """Return flag -> option for the training features that are allowed after ``--`` on streams of images."""
    return {
        option.flag: option
        for kind in FEATURES
        for option in options_of(kind).values()
        if option.side == TRAINING and "images" in option.kinds and option.flag not in kind.owned
    }
