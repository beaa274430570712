"""UMix: several models trained jointly, on the mean of their logits (the paper's uniform mixture).

    --arch alma_umix --num-members 2 --member-arch alma_switch_lm_tiny --member-options "--num-experts 4 --dropout 0.1"
    --arch alma_umix --num-members 5 --member-arch alma_mlp --member-options "--width 64"

The members are of one architecture and differ by their random initial weights alone.

Letters: N members, B sequences, T positions, M model dim, V units of the vocabulary.
"""

from dataclasses import dataclass, field
from typing import Any, Optional, Sequence

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqLanguageModel, register_model
from fairseq.tasks import FairseqTask
from omegaconf import II
from torch import Tensor

from fairseq_alma.checkpoints import JOINT_MODEL
from fairseq_alma.errors import AlmaError
from fairseq_alma.models.feature_decoder import FeatureDecoder
from fairseq_alma.models.member_decoder import MemberDecoder
from fairseq_alma.models.member_options import build_member_config
from fairseq_alma.modules.text.causal_self_attention import IncrementalState


@dataclass
class AlmaUMixConfig(FairseqDataclass):
    """Options of a uniform mixture; its members' own options are one quoted string."""

    num_members: int = field(default=2, metadata={"help": "number of models that are trained jointly"})
    member_arch: str = field(default="alma_switch_lm_tiny", metadata={"help": "architecture of each member"})
    member_options: str = field(
        default="",
        metadata={"help": "options of the members' architecture in one string, as '--num-experts 8 --dropout 0'"},
    )
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
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the (B, T, N M) features of all members, side by side.

        ``routing`` and ``switch`` list the Switch layers of member 0, then of member 1, ….
        """
        outputs = [
            member(prev_output_tokens, incremental_state=incremental_state, features_only=True)
            for member in self.members
        ]
        extra: dict[str, Any] = {"attn": [None], "routing": [], "switch": []}
        for _, member_extra in outputs:
            extra["routing"] += member_extra["routing"]
            extra["switch"] += member_extra["switch"]
        return torch.cat([features for features, _ in outputs], dim=-1), extra

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

    @classmethod
    def build_model(cls, cfg: AlmaUMixConfig, task: FairseqTask) -> "AlmaUMix":
        """Build the members one after the other, so that each draws initial weights of its own.

        Raises:
            AlmaError: if there is no such architecture, or the members' options are not its own or do not fit together.
        """
        if cfg.num_members < 1:
            raise AlmaError(f"--num-members {cfg.num_members}: must be at least 1")
        model, config = build_member_config(cfg)
        if hasattr(model, "build_joint"):
            return model.build_joint(config, task, cfg.num_members)
        members = [model.build_model(config, task) for _ in range(cfg.num_members)]
        return cls(UMixDecoder(task.source_dictionary, members))

    def output_factors(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return two tensors whose product is the logits: features (…, N M) / N and output embeddings (V, N M)."""
        weights = [member.decoder.output_projection.weight for member in self.decoder.members]
        return features / len(weights), torch.cat(weights, dim=1)
