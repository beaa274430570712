"""UMix: several models trained jointly, on the mean of their logits (the paper's uniform mixture); images: or the sum.

    --arch alma_umix --num-members 2 --member-arch alma_switch_lm_tiny --member-options "--num-experts 4 --dropout 0.1"
    --arch alma_umix --num-members 5 --member-arch alma_mlp --member-options "--width 64"

The members are of one architecture and differ by their random initial weights alone.

Letters: N members, B sequences, T positions, M model dim, V vocabulary size.
"""

import argparse
import shlex
from dataclasses import dataclass
from typing import Any, Mapping, NoReturn, Optional, Sequence

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    MODEL_REGISTRY,
    FairseqLanguageModel,
    register_model,
)
from fairseq.tasks import FairseqTask
from omegaconf import II, DictConfig, OmegaConf
from torch import Tensor

from fairseq_alma.checkpoints import JOINT_MODEL
from fairseq_alma.checkpoints.model_options import JointOptions
from fairseq_alma.errors import AlmaError
from fairseq_alma.text.decoder import FeatureDecoder, IncrementalState, MemberDecoder
from fairseq_alma.training.fairseq_options import check_options, fairseq_config

_Options: Any = fairseq_config("UMix", FairseqDataclass, [JointOptions])


@dataclass
class AlmaUMixConfig(_Options):
    """Options of a uniform mixture."""

    # What members take from elsewhere in the command, by the same names; None where the task has no such option.
    tokens_per_sample: Optional[int] = II("oc.select:task.tokens_per_sample")
    max_target_positions: Optional[int] = II("oc.select:task.max_target_positions")


class UMixDecoder(MemberDecoder, FeatureDecoder):
    """Compute the mean of the members' logits.

    Args:
        dictionary: the vocabulary.
        members: the models; each has a decoder with features and an output projection.
    """

    def __init__(self, dictionary: Dictionary, members: Sequence[FairseqLanguageModel]) -> None:
        super().__init__(dictionary, members)
        self.feature_dims = [member.decoder.output_projection.in_features for member in members]

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: Optional[IncrementalState] = None,
        is_padded: bool = True,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the (B, T, N M) features of all members, side by side.

        ``routing`` and ``switch`` list the Switch layers of member 0, then of member 1, …; ``members`` what each gives.
        """
        given = {"incremental_state": incremental_state, "features_only": True, "is_padded": is_padded}
        features, extras = zip(*(member(prev_output_tokens, **given) for member in self.members), strict=True)
        joined = {key: [each for extra in extras for each in extra[key]] for key in ("routing", "switch")}
        return torch.cat(features, dim=-1), {"attn": [None], **joined, "members": extras}

    def output_layer(self, features: Tensor, **unused: Any) -> Tensor:
        """Project (…, N M) features to the (…, V) mean of the members' logits, one member after the other."""
        parts = features.split(self.feature_dims, dim=-1)
        total = self.members[0].output_layer(parts[0])
        for member, part in zip(self.members[1:], parts[1:], strict=True):
            total = total + member.output_layer(part)
        return total / len(self.members)


@register_model(JOINT_MODEL, dataclass=AlmaUMixConfig)
class AlmaUMix(FairseqLanguageModel):
    """Several language models that are trained, and predict, as one.

    Args:
        decoder: holds the members.
    """

    def __init__(self, decoder: UMixDecoder) -> None:
        super().__init__(decoder)
        # Each member's balance loss counts as much as if it was trained alone; all have the same weight.
        self.balance_loss_weight = decoder.members[0].balance_loss_weight
        self.is_compiled = decoder.members[0].is_compiled

    @classmethod
    def build_model(cls, cfg: AlmaUMixConfig, task: FairseqTask) -> "AlmaUMix":
        """Build the members one after the other, so that each draws initial weights of its own.

        Raises:
            AlmaError: if there is no such architecture, or the members' options are not its own or do not fit together.
        """
        check_options(cfg)
        model, config = build_member_config(cfg)
        if hasattr(model, "build_joint"):
            return model.build_joint(config, task, cfg.num_members, str(cfg.joint_logits))
        if str(cfg.joint_logits) != "mean":
            raise AlmaError(f"--joint-logits {cfg.joint_logits}: is for image models; language models have the mean")
        members = [model.build_model(config, task) for _ in range(cfg.num_members)]
        return cls(UMixDecoder(task.source_dictionary, members))

    @classmethod
    def member_config(cls, cfg: Mapping[str, Any]) -> FairseqDataclass:
        """Return the options of one member."""
        return build_member_config(OmegaConf.create(dict(cfg)))[1]

    def output_factors(self, features: Tensor, extra: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return two tensors whose product is the logits: features (…, N M) / N and output embeddings (V, N M)."""
        members = zip(self.decoder.members, extra["members"], strict=True)
        weights = [member.output_factors(features, each)[1] for member, each in members]
        return features / len(weights), torch.cat(weights, dim=1)


class _MemberParser(argparse.ArgumentParser):
    """Names the option that has the members' options in it, in one line."""

    def error(self, message: str) -> NoReturn:
        raise AlmaError(f"--member-options: {message}; give options of the architecture that --member-arch names")


def build_member_config(cfg: DictConfig) -> tuple[Any, FairseqDataclass]:
    """Read the members' options as fairseq-train reads those of ``--arch``.

    Args:
        cfg: has ``member_arch`` and ``member_options``; and, by their own names, the options that the members'
            architecture takes from elsewhere in the command, such as ``tokens_per_sample``; what it lacks is None.

    Returns:
        The class of the members and their configuration.

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
    members by itself, as image models do.
    """
    possible = sorted(
        name
        for name, model in ARCH_MODEL_NAME_REGISTRY.items()
        if name.startswith("alma_") and model != JOINT_MODEL and _can_be_joined(MODEL_REGISTRY[model])
    )
    if arch not in possible:
        raise AlmaError(f"--member-arch {arch}: cannot be a member; choose from {', '.join(possible)}")
    return MODEL_REGISTRY[ARCH_MODEL_NAME_REGISTRY[arch]]


def _can_be_joined(model: Any) -> bool:
    return hasattr(model, "output_factors") or hasattr(model, "build_joint")
