"""``alma_umix``: several image models trained jointly on the mean or sum of their logits (UMix of the paper).

    --arch alma_umix --num-members 5 --member-arch alma_mlp --member-options "--width 64"

All members have the same architecture and different random initial weights.
"""

import argparse
import shlex
from typing import Any, Mapping, NoReturn

from fairseq.dataclass import FairseqDataclass
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    MODEL_REGISTRY,
    BaseFairseqModel,
    register_model,
)
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig, OmegaConf

from fairseq_alma.checkpoints import JOINT_MODEL
from fairseq_alma.checkpoints.model_options import JointOptions
from fairseq_alma.errors import AlmaError
from fairseq_alma.images.image_classifier import image_architectures
from fairseq_alma.training.fairseq_options import check_options, fairseq_config

AlmaUMixConfig: Any = fairseq_config("AlmaUMixConfig", FairseqDataclass, [JointOptions])


@register_model(JOINT_MODEL, dataclass=AlmaUMixConfig)
class AlmaUMix(BaseFairseqModel):
    """Build an `ImageClassifier` with several members."""

    @classmethod
    def build_model(cls, cfg: Any, task: FairseqTask) -> BaseFairseqModel:
        """Build the members with different initial weights.

        Raises:
            AlmaError: the architecture cannot be a member, or a member option is invalid.
        """
        check_options(cfg)
        model, config = build_member_config(cfg)
        return model.build_model(config, task, cfg.num_members, str(cfg.joint_logits))

    @classmethod
    def member_config(cls, cfg: Mapping[str, Any]) -> FairseqDataclass:
        return build_member_config(OmegaConf.create(dict(cfg)))[1]


class _MemberParser(argparse.ArgumentParser):
    """Parser that raises AlmaError with a message that begins with --member-options."""

    def error(self, message: str) -> NoReturn:
        raise AlmaError(f"--member-options: {message}; give options of --member-arch")


def build_member_config(cfg: DictConfig) -> tuple[Any, FairseqDataclass]:
    """Return (class, configuration) of the members, from ``member_arch`` and ``member_options``.

    Raises:
        AlmaError: the architecture cannot be a member, or an option does not exist.
    """
    possible = image_architectures()
    if cfg.member_arch not in possible:
        raise AlmaError(f"--member-arch {cfg.member_arch}: cannot be a member; choose from {', '.join(possible)}")
    model: Any = MODEL_REGISTRY[ARCH_MODEL_NAME_REGISTRY[cfg.member_arch]]
    config_class = MODEL_DATACLASS_REGISTRY[ARCH_MODEL_NAME_REGISTRY[cfg.member_arch]]
    parser = _MemberParser(argument_default=argparse.SUPPRESS, allow_abbrev=False, add_help=False)
    model.add_args(parser)
    try:
        words = shlex.split(cfg.member_options)
    except ValueError as error:
        parser.error(f"{cfg.member_options!r}: {error}")
    options = parser.parse_args(words)
    ARCH_CONFIG_REGISTRY[cfg.member_arch](options)
    return model, config_class.from_namespace(options)
