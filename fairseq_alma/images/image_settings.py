"""Settings of a run on images: architecture, training, and the configuration in its checkpoints.

The options are read by fairseq's own parser, so that fairseq's commands train and test the same models.
"""

import argparse
import shlex
import warnings
from typing import Any, Mapping, NoReturn, Optional

import torch
from fairseq import options as fairseq_options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY
from fairseq.optim import build_optimizer
from omegaconf import OmegaConf

from fairseq_alma.checkpoints import JOINT_MODEL
from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.errors import AlmaError
from fairseq_alma.images.image_classifier import GrownLayers, ImageClassifier, image_architectures
from fairseq_alma.images.image_train_options import ImageTrainOptions
from fairseq_alma.images.networks import ImageKind, ImageNetwork
from fairseq_alma.images.stage_training import TrainingSettings
from fairseq_alma.learners.learner import Growth


class ImageSettings:
    """Settings of a run; ``num_joint`` members are trained as one, on the ``mean`` or ``sum`` of their logits.

    Attributes:
        device: the GPU, if there is one and --cpu was not given.
        is_joint: whether members are trained as one.
    """

    def __init__(
        self, stream: ImageStream, options: ImageTrainOptions, num_joint: int = 1, joint_logits: str = "mean"
    ) -> None:
        self.stream, self.options = stream, options
        self.images = ImageKind(stream.shape, stream.num_classes)
        self.num_joint, self.is_joint, self.joint_logits = num_joint, num_joint > 1, joint_logits
        self.model_class = image_model(options.arch)
        words = [str(stream.stream.root), "--task", "alma_image_classification"]
        words += ["--criterion", "alma_image_cross_entropy", *options.words()]
        parser = fairseq_options.get_training_parser()
        parser.error = _refuse
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fairseq uses parts of hydra that hydra would have it replace
            self.cfg = convert_namespace_to_omegaconf(fairseq_options.parse_args_and_arch(parser, words))
        use_gpu = torch.cuda.is_available() and not self.cfg.common.cpu
        self.device = torch.device("cuda" if use_gpu else "cpu")
        content = OmegaConf.to_container(self.cfg, resolve=True)
        assert isinstance(content, dict)
        self._plain = _without_objects(
            {name: vars(part) if isinstance(part, argparse.Namespace) else part for name, part in content.items()}
        )
        try:
            self._optimizer = build_optimizer(self.cfg.optimizer, [torch.nn.Parameter(torch.zeros(1))]).optimizer
        except (ValueError, TypeError) as error:
            optimizer = " ".join(self.options.last("--optimizer") or ())
            raise AlmaError(
                f"options after the --: --optimizer {optimizer} refuses its options ({error}); correct them, or leave "
                "them out"
            ) from error
        try:  # before anything is written
            self.build(1)
        except RuntimeError as error:
            if not any(word in str(error) for word in ("memory", "overflow")):
                raise
            sizes = " ".join(self.options.model_words())
            raise AlmaError(
                f"options after the --: {self.options.arch} {sizes} does not fit into memory; give smaller sizes"
            ) from error

    def training(self) -> TrainingSettings:
        first = self._optimizer  # copied: fairseq reads the options anew for each optimizer that it builds
        return TrainingSettings(
            **vars(self.options.loop),
            build_optimizer=lambda parameters: type(first)(parameters, **first.defaults),
            is_joint=self.is_joint,
            joint_logits=self.joint_logits,
        )

    def build(self, num_members: int, grown: Optional[GrownLayers] = None) -> ImageNetwork:
        """Build members side by side, without initial weights, on the CPU; see `ImageClassifier.build_members`."""
        return self.model_class.build_members(self.cfg.model, self.images, num_members, grown)

    def check_growth(self, growth: Growth) -> None:
        self.model_class.check_growth(self.cfg.model, self.images, growth)

    def grown_layers(self, network: ImageNetwork) -> GrownLayers:
        return self.model_class.grown_layers(network)

    def read_grown(self, options: Mapping[str, Any]) -> GrownLayers:
        """Read what growth has changed from a checkpoint's options of it; see `GrownLayers.options`.

        Raises:
            AlmaError: or an error of OmegaConf, if the run's architecture knows no such options.
        """
        return self.model_class.read_grown(OmegaConf.merge(self.cfg.model, dict(options)))

    def checkpoint_config(self, grown: GrownLayers) -> dict[str, Any]:
        if self.is_joint:
            model: dict[str, Any] = {
                "_name": JOINT_MODEL,
                "num_members": self.num_joint,
                "member_arch": self.options.arch,
                "member_options": shlex.join(self.options.model_words()),
                "joint_logits": self.joint_logits,
            }
        else:
            model = {**self._plain["model"], **grown.options()}
        return {**self._plain, "model": model}


def image_model(arch: str) -> type[ImageClassifier]:
    """Return the model class of an architecture. Raises AlmaError if it takes no images."""
    possible = image_architectures()
    if arch not in possible:
        raise AlmaError(f"--arch {arch}: takes no images; choose from {', '.join(possible)}")
    return MODEL_REGISTRY[ARCH_MODEL_NAME_REGISTRY[arch]]


def _without_objects(content: Any) -> Any:
    """Return plain data, in which other objects, such as enumeration values, are strings."""
    if isinstance(content, dict):
        return {name: _without_objects(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_without_objects(value) for value in content]
    if content is None or type(content) in (bool, int, float, str):
        return content
    return str(content)


def _refuse(message: str) -> NoReturn:
    raise AlmaError(f"options after the --: {message.replace('invalid <lambda> value', 'invalid value')}")
