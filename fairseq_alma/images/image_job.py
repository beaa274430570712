"""Options and plan of ``alma-stream`` for streams of images. All stages run in one process; see `StageTrainer`.

Supported options: network, optimizer and training loop (as in fairseq-train), selection of the best epoch, and training
features. Without a preset, the defaults are the settings of the paper (Appendix B.1): a fully connected network and
AdaDelta for MNIST and similar data sets, and a VGG network and SGD for CIFAR.
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence

from fairseq_alma.checkpoints.model_options import IMAGE_NETWORKS, IMAGES
from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import BOTH_STUDIES, MLP_STUDY, VGG_STUDY, Learner, Preset, StagePlan, with_preset
from fairseq_alma.options import (
    TRAINING,
    Option,
    Options,
    flags_of,
    group_words,
    integer,
    opt,
    options_of,
    real,
    without,
)
from fairseq_alma.runs.curves import CURVE_OPTIONS
from fairseq_alma.runs.loop import Backend, Run, describe_stage
from fairseq_alma.runs.run_folder import RunFolder, predicting_checkpoint
from fairseq_alma.runs.study import RunRequest
from fairseq_alma.training.feature import FEATURES, Features, Setting

# Optimizer -> options of the optimizer.
# These optimizers update each weight independently, so the members of a network do not affect each other.
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "adadelta": ("--adadelta-rho", "--adadelta-eps", "--weight-decay"),
    "sgd": ("--momentum", "--weight-decay"),
    "adam": ("--adam-betas", "--adam-eps", "--weight-decay"),
}
MODEL_OPTIONS = flags_of(*IMAGE_NETWORKS)


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

    def is_better(self, score: float, best: float) -> bool:
        """Return whether a score is lower than the best score by at least ``least_gain``."""
        return score < best and score <= best - self.least_gain + 1e-9  # the difference of two accuracies is rounded


class ImageTrainOptions:
    """Options after ``--`` of a run on images. Without a preset, the defaults are the settings of the paper.

    Args:
        words: command-line arguments after ``--``.
        learner: class of the learner.
        for_photographs: whether to use the paper's settings for CIFAR instead of the settings for MNIST.
        preset: preset whose values replace the defaults; None if not given.

    Attributes:
        values: flag of each option -> value of the option, as command-line arguments.
        overridden: flags of the options whose value on the command line differs from the value in the preset.
        arch: name of the architecture.
        loop: options of the training loop.

    Raises:
        ValueError: an option is unknown or out of range, or the learner does not support the architecture.
    """

    def __init__(
        self, words: Sequence[str], learner: type[Learner], for_photographs: bool, preset: Optional[Preset] = None
    ) -> None:
        given = dict(group_words(words))
        known = {"--arch", "--optimizer", "--cpu", *MODEL_OPTIONS, *flags_of(LoopOptions)}
        known.update(CURVE_OPTIONS, feature_options(), *OPTIMIZERS.values())
        for name, instead in learner.owned.items():
            if any(given.get(name, ())):
                raise ValueError(f"{name} after --: {instead}")
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
        of_preset: Mapping[str, Optional[str]] = {}
        if preset is not None:
            arch = " ".join(given.get("--arch", (defaults["--arch"],)))
            own, of_vgg = preset.own_training.get(learner.name, {}), preset.vgg if "vgg" in arch else {}
            of_preset = {**preset.training, **own, **of_vgg}
        one_word = {name: " ".join(values) for name, values in given.items() if name in of_preset}
        needed, self.overridden = with_preset(one_word, of_preset)
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
        self.loop = LoopOptions(**self.values_of(options_of(LoopOptions).values()))
        for options in (*map(options_of, IMAGE_NETWORKS), feature_options()):
            self.values_of(options.values())  # raises ValueError if a value is out of range

    def words(self, names: Optional[Iterable[str]] = None) -> list[str]:
        """Return the options ``names`` (None: all options) and their values as command-line arguments."""
        return [word for name in (self.values if names is None else names) for word in (name, *self.values[name])]

    def fairseq_words(self) -> list[str]:
        """Return the options of this job that fairseq-train supports too, as command-line arguments."""
        others = {*CURVE_OPTIONS, "--select", "--least-gain", *feature_options()}
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
    """Return flag -> option for the options of training features that a run on images accepts after ``--``."""
    return {
        option.flag: option
        for kind in FEATURES
        for option in options_of(kind).values()
        if option.side == TRAINING and "images" in option.kinds and option.flag not in kind.owned
    }


class ImageJob:
    """Options of ``alma-stream`` for a stream of images, and the plan that ``--dry-run`` prints.

    Args:
        request: options of ``alma-stream``.
        own_words: command-line arguments before ``--``.
        words: command-line arguments after ``--``.
        images: stream of images.

    Raises:
        ValueError: an option after ``--`` is invalid.
    """

    unit = "image"

    def __init__(
        self, request: RunRequest, own_words: Sequence[str], words: Sequence[str], images: ImageStream
    ) -> None:
        self.request, self.own_words, self.images = request, own_words, images
        self.options = ImageTrainOptions(words, request.learner, images.has_photographs, request.preset)
        self.overridden: Sequence[str] = self.options.overridden
        self.features = request.features.with_options(self.options.values_of(feature_options().values()))
        self.last = self.options.values.get

    def train_options(self) -> dict[str, str]:
        return {name: " ".join(values) for name, values in self.options.values.items()}

    def prepare(self, plans: Sequence[StagePlan]) -> Callable[[Sequence[Run]], Backend]:
        """Check the options, and that each stage has validation images. Return a function that creates the back end."""
        for plan in plans:
            if not len(self.images.indices("valid", plan.stage.megabatches)):
                raise AlmaError(
                    f"{self.images.stream.root}: stage {plan.stage.index} has no validation images to select the best "
                    "epoch; prepare the stream with fewer mega-batches, or increase --wait"
                )
        # Torch reads OMP_NUM_THREADS on import. On a busy machine, small networks are slower with several threads.
        if "mlp" in self.options.arch:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        # Import fairseq first: this import also registers our models, and fails if our modules are partly imported.
        import fairseq  # noqa: F401

        from fairseq_alma.images import firefly, model_store, stage_trainer

        for own in (plan.trainings for plan in plans):
            if len({each.start is None for each in own}) > 1 or (len(own) > 1 and any(each.growth for each in own)):
                raise AlmaError(
                    f"--learner {self.request.learner.name}: on images, the models of a stage all start with random "
                    "weights or all continue, and only a single model can grow; change the learner's plan"
                )
        trainings = [training for plan in plans for training in plan.trainings]
        num_images = [len(self.images.indices("train", plan.stage.megabatches)) for plan in plans]
        smallest = min(
            size for each in num_images for size in stage_trainer.batch_sizes(each, self.options.loop.batch_size)
        )
        joint = trainings[0].num_joint, trainings[0].joint_logits
        settings = model_store.ImageSettings(self.images, self.options, *joint, smallest)
        for growth in {training.growth for training in trainings if training.growth is not None}:
            if growth.method == "firefly":
                sizes = settings.images.shape[0], int(settings.cfg.model.channels), settings.images.num_classes
                # raises AlmaError if the share is too small
                firefly.amount_to_add(*sizes, growth.share, growth.share_of)
        features = Features(self.features.each, Setting(settings.device.type, str(settings.cfg.optimizer._name)))
        features.prepare()

        return lambda runs: stage_trainer.StageTrainer(settings, runs, self.request, features)

    def print_plan(self, plans: Sequence[StagePlan], folder: RunFolder, name: str) -> None:
        """Print one ``alma-stream`` command for each planned stage, with all options; ``name``: see `RunDisplay`."""
        print("# alma-stream runs all stages in one process; to run single stages, use these commands in this order")
        own = without(self.own_words, "--dry-run", "--stage")
        for plan in self.request.chosen(plans):
            first, num_models = plan.trainings[0], len(plan.trainings) * plan.trainings[0].num_joint
            text = f"train {num_models} models" if num_models > 1 else "train a model"
            text += "" if first.start is None else f", starting from stage {first.start.stage}"
            if first.growth is not None:
                text += f", after growth ({first.growth.method})"
            if len(plan.predictors) > 1:
                text += f"; {len(plan.predictors)} models predict"
            print(f"# {name}{describe_stage(plan, len(plans))}: {text}")
            command = ["alma-stream", *own, "--stage", str(plan.stage.index)]
            print(f"{shlex.join(command)} -- {shlex.join(self.options.words())}")

    def predictors(self, folder: RunFolder, plan: StagePlan) -> list[Path]:
        """Return the paths of the checkpoints that are evaluated after the stage."""
        return [predicting_checkpoint(folder, model, self.features.predicts_with) for model in plan.predictors]
