"""``alma_umix``: several image models trained jointly on the mean or sum of their logits (UMix of the paper).

    --arch alma_umix --num-members 5 --member-arch alma_mlp --member-options "--width 64"

All members have the same architecture and different random initial weights.
"""

import argparse
import shlex
from typing import Any, NoReturn

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

from fairseq_alma.checkpoints import JOINT_MODEL
from fairseq_alma.checkpoints.model_options import JointOptions
from fairseq_alma.errors import AlmaError
from fairseq_alma.images.image_models import image_architectures
from fairseq_alma.training.fairseq_options import check_options, fairseq_config

AlmaUMixConfig: Any = fairseq_config("AlmaUMixConfig", FairseqDataclass, [JointOptions])


@register_model(JOINT_MODEL, dataclass=AlmaUMixConfig)
class AlmaUMix(BaseFairseqModel):
    """fairseq model ``alma_umix``, which builds an `ImageClassifier` with several members."""

    @classmethod
    def build_model(cls, cfg: Any, task: FairseqTask) -> BaseFairseqModel:
        """Build a model whose members have different initial weights. Raises AlmaError as `member_config` does."""
        check_options(cfg)
        model, config = cls.member_config(cfg.member_arch, cfg.member_options)
        return model.build_model(config, task, cfg.num_members, str(cfg.joint_logits))

    @classmethod
    def member_config(cls, arch: str, member_options: str) -> tuple[Any, FairseqDataclass]:
        """Return (class, configuration) of the members, from the values of ``--member-arch`` and ``--member-options``.

        Raises:
            AlmaError: the architecture cannot be a member, or a member option is invalid.
        """
        possible, name = image_architectures(), ARCH_MODEL_NAME_REGISTRY.get(arch, "")
        if arch not in possible:
            raise AlmaError(f"--member-arch {arch}: cannot be a member; choose from {', '.join(possible)}")
        model: Any = MODEL_REGISTRY[name]
        parser = _MemberParser(argument_default=argparse.SUPPRESS, allow_abbrev=False, add_help=False)
        model.add_args(parser)
        try:
            words = shlex.split(member_options)
        except ValueError as error:
            parser.error(f"{member_options!r}: {error}")
        options = parser.parse_args(words)
        ARCH_CONFIG_REGISTRY[arch](options)
        return model, MODEL_DATACLASS_REGISTRY[name].from_namespace(options)


class _MemberParser(argparse.ArgumentParser):
    """Parser of ``--member-options`` that raises AlmaError instead of exiting the process."""

    def error(self, message: str) -> NoReturn:
        raise AlmaError(f"--member-options: {message}; give only options of --member-arch")
