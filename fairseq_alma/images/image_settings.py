"""Settings of a run on images: architecture, training settings, and the fairseq configuration for checkpoints.

fairseq's parser reads the options, so that fairseq's commands can load and test the models of a run.
"""

import argparse
import json
import shlex
import warnings
from typing import Any, Mapping, NoReturn, Optional

import torch
from fairseq import options as fairseq_options
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY
from fairseq.optim import build_optimizer
from omegaconf import OmegaConf

from fairseq_alma.checkpoints import JOINT_MODEL
from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.errors import AlmaError
from fairseq_alma.images.image_classifier import GrownLayers, ImageClassifier, image_architectures
from fairseq_alma.images.image_train_options import MODEL_OPTIONS, ImageTrainOptions
from fairseq_alma.images.networks import ImageKind, ImageNetwork
from fairseq_alma.images.stage_training import TrainingSettings
from fairseq_alma.training.fairseq_options import configuration_of


class ImageSettings:
    """Settings of a run on images.

    Args:
        stream: stream of images.
        options: options after ``--``.
        num_joint: number of members of a joint model; 1: a single model.
        joint_logits: how the logits of a joint model's members are combined: ``mean`` or ``sum``.

    Attributes:
        images: shape and number of classes of the images.
        model_class: class of the architecture.
        cfg: fairseq's configuration, parsed from the options.
        device: the GPU if a GPU is available and --cpu is not given, else the CPU.
        is_joint: whether several members are trained as one model.
        training: settings of the training loop.

    Raises:
        AlmaError: the architecture is not an image model, fairseq rejects an option, or the model does not fit into
            memory.
    """

    def __init__(
        self, stream: ImageStream, options: ImageTrainOptions, num_joint: int = 1, joint_logits: str = "mean"
    ) -> None:
        self.stream, self.options = stream, options
        self.images = ImageKind(stream.shape, stream.num_classes)
        self.num_joint, self.is_joint, self.joint_logits = num_joint, num_joint > 1, joint_logits
        possible = image_architectures()
        if options.arch not in possible:
            raise AlmaError(f"--arch {options.arch}: not an image model; choose from {', '.join(possible)}")
        self.model_class: type[ImageClassifier] = MODEL_REGISTRY[ARCH_MODEL_NAME_REGISTRY[options.arch]]
        self._model_words = options.words(name for name in options.values if name in MODEL_OPTIONS[1:])
        words = [str(stream.stream.root), "--task", "alma_image_classification"]
        words += ["--criterion", "alma_image_cross_entropy", *options.fairseq_words()]
        parser = fairseq_options.get_training_parser()
        parser.error = _refuse
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of hydra, for options of classes without a dataclass
            self.cfg = configuration_of(fairseq_options.parse_args_and_arch(parser, words))
        use_gpu = torch.cuda.is_available() and not self.cfg.common.cpu
        self.device = torch.device("cuda" if use_gpu else "cpu")
        content: Any = OmegaConf.to_container(self.cfg, resolve=True)
        content = {name: vars(part) if isinstance(part, argparse.Namespace) else part for name, part in content.items()}
        self._plain = json.loads(json.dumps(content, default=str))  # default=str converts enumeration values
        try:
            first = build_optimizer(self.cfg.optimizer, [torch.nn.Parameter(torch.zeros(1))]).optimizer
        except (ValueError, TypeError) as error:
            raise AlmaError(
                f"options after --: the optimizer {self.cfg.optimizer._name} rejects its options ({error}); "
                "correct or remove these options"
            ) from error
        self.training = TrainingSettings(
            **vars(options.loop),
            # Copy the first optimizer, because fairseq would parse the options again for each optimizer.
            build_optimizer=lambda parameters: type(first)(parameters, **first.defaults),
            is_joint=self.is_joint,
            joint_logits=joint_logits,
        )
        try:  # fail before any file is written
            self.build(1)
        except RuntimeError as error:
            if not any(word in str(error) for word in ("memory", "overflow")):
                raise
            raise AlmaError(
                f"options after --: the network {options.arch} {' '.join(self._model_words)} does not fit into "
                "memory; reduce the sizes of the network"
            ) from error

    def build(self, num_members: int, grown: Optional[GrownLayers] = None) -> ImageNetwork:
        """Build a network with uninitialized weights, on the CPU; see `ImageClassifier.build_members`."""
        return self.model_class.build_members(self.cfg.model, self.images, num_members, grown)

    def read_grown(self, options: Mapping[str, Any]) -> GrownLayers:
        """Return the layer sizes after growth from the model options in a checkpoint; see `GrownLayers.options`.

        Raises:
            AlmaError: the value of an option is invalid.
            OmegaConfBaseException: the architecture does not have one of the options.
        """
        return self.model_class.read_grown(OmegaConf.merge(self.cfg.model, dict(options)))

    def checkpoint_config(self, grown: GrownLayers) -> dict[str, Any]:
        """Return the fairseq configuration (``cfg``) to store in a checkpoint."""
        model = {**self._plain["model"], **grown.options()}
        if self.is_joint:
            model = {
                "_name": JOINT_MODEL,
                "num_members": self.num_joint,
                "member_arch": self.options.arch,
                "member_options": shlex.join(self._model_words),
                "joint_logits": self.joint_logits,
            }
        return {**self._plain, "model": model}


def _refuse(message: str) -> NoReturn:
    raise AlmaError(f"options after --: {message.replace('invalid <lambda> value', 'invalid value')}")
