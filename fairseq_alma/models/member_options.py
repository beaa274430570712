"""The options of models inside a model, given as one string and read as fairseq-train reads those of ``--arch``."""

import argparse
import shlex
from typing import Any, NoReturn

from fairseq.dataclass import FairseqDataclass
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    MODEL_REGISTRY,
)
from omegaconf import DictConfig

from fairseq_alma.errors import AlmaError


class _MemberParser(argparse.ArgumentParser):
    """Names the option that has the members' options in it, in one line."""

    def error(self, message: str) -> NoReturn:
        raise AlmaError(f"--member-options: {message}; give options of the architecture that --member-arch names")


def build_member_config(cfg: DictConfig) -> tuple[Any, FairseqDataclass]:
    """Return the class of the members and their configuration.

    Args:
        cfg: has ``member_arch`` and ``member_options``; and, by their own names, the options that the members'
            architecture takes from elsewhere in the command, such as ``tokens_per_sample``; what it lacks is None.

    Raises:
        AlmaError: if the architecture cannot be a member, or an option is not one of its own.
    """
    model = _model_of(cfg.member_arch)
    config_class = MODEL_DATACLASS_REGISTRY[ARCH_MODEL_NAME_REGISTRY[cfg.member_arch]]
    parser = _MemberParser(argument_default=argparse.SUPPRESS, allow_abbrev=False, add_help=False)
    model.add_args(parser)
    try:
        words = shlex.split(cfg.member_options)
    except ValueError as error:
        parser.error(f"{cfg.member_options!r}: {error}")
    options = parser.parse_args(words)
    ARCH_CONFIG_REGISTRY[cfg.member_arch](options)
    config = config_class.from_namespace(options)
    for name, value in vars(config).items():
        if isinstance(value, str) and value.startswith("${"):
            setattr(config, name, cfg.get(name))
    return model, config


def _model_of(arch: str) -> Any:
    """Return the class of an architecture of this package that can be a member.

    Of language models, those whose logits are a product of features and output embeddings; and what builds several
    members by itself, as models of images do.
    """
    possible = sorted(
        name
        for name, model in ARCH_MODEL_NAME_REGISTRY.items()
        if name.startswith("alma_") and model != "alma_umix" and _can_be_joined(MODEL_REGISTRY[model])
    )
    if arch not in possible:
        raise AlmaError(f"--member-arch {arch}: cannot be a member; choose from {', '.join(possible)}")
    return MODEL_REGISTRY[ARCH_MODEL_NAME_REGISTRY[arch]]


def _can_be_joined(model: Any) -> bool:
    return hasattr(model, "output_factors") or hasattr(model, "build_joint")
