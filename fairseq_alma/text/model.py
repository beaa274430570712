"""The Switch language model: a decoder-only Transformer whose every second feed-forward layer is a Switch layer.

The paper's SM for text (v5, section 5): a *base* model of 6 layers and width 512, a *large* one of 12 and 768.
"""

import argparse
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

from fairseq import utils
from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqLanguageModel, register_model, register_model_architecture
from fairseq.tasks import FairseqTask
from omegaconf import II

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.checkpoints.model_options import LANGUAGE, SWITCH_SIZES, Beginning, starting_checkpoint
from fairseq_alma.errors import AlmaError
from fairseq_alma.text.decoder import SwitchDecoder
from fairseq_alma.text.feature_decoder import mark_for_optimizers
from fairseq_alma.training.fairseq_options import check_options, fairseq_config

DEFAULT_NUM_EXPERTS = 4


_Options: Any = fairseq_config("SwitchLM", FairseqDataclass, LANGUAGE)


@dataclass
class AlmaSwitchLMConfig(_Options, Beginning):
    """Options of the Switch language model."""

    # The longest sequence is the task's sample length unless the task sets another limit, as in transformer_lm.
    # None where the task has no such option, which build_model refuses.
    tokens_per_sample: Optional[int] = II("oc.select:task.tokens_per_sample")
    max_target_positions: Optional[int] = II("oc.select:task.max_target_positions")


@register_model("alma_switch_lm", dataclass=AlmaSwitchLMConfig)
class AlmaSwitchLM(FairseqLanguageModel):
    """A language model with Switch layers, for ``--task alma_lm``.

    Args:
        decoder: the model itself.
        balance_loss_weight: what the criterion multiplies the load-balancing loss with.
        is_compiled: whether the criterion lets ``torch.compile`` fuse what both do in training.

    Attributes:
        residual_outputs: endings of the names of parameters in a layer whose output is added to the residual stream.
    """

    residual_outputs = ("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias", "fc2_weight", "fc2_bias")

    def __init__(self, decoder: SwitchDecoder, balance_loss_weight: float, is_compiled: bool = False) -> None:
        super().__init__(decoder)
        mark_for_optimizers(decoder)
        self.balance_loss_weight = balance_loss_weight
        self.is_compiled = is_compiled

    @classmethod
    def build_model(cls, cfg: AlmaSwitchLMConfig, task: FairseqTask) -> "AlmaSwitchLM":
        """Build the model that the options describe.

        Raises:
            AlmaError: if options do not fit together, or the checkpoint to start from is none.
        """
        cls.complete_options(cfg)
        check_options(cfg)
        if cfg.decoder_embed_dim % cfg.decoder_attention_heads:
            raise AlmaError(
                f"--decoder-attention-heads {cfg.decoder_attention_heads}: must divide --decoder-embed-dim "
                f"{cfg.decoder_embed_dim}"
            )
        max_positions = cfg.max_target_positions or cfg.tokens_per_sample
        if max_positions is None:
            raise AlmaError(
                "--tokens-per-sample: the task has none, and a language model needs it; give --task alma_lm"
            )
        return cls(SwitchDecoder(cfg, task.source_dictionary, max_positions), cfg.balance_loss_weight, cfg.compile)

    @classmethod
    def complete_options(cls, cfg: AlmaSwitchLMConfig, continue_once: Optional[str] = None) -> None:
        """Fill in the number of experts and the gates' trees where the command line left them open.

        They are those of the checkpoint that training starts from, so that a grown model trains on without further
        options.

        Args:
            cfg: filled in here.
            continue_once: value of ``--continue-once``, which models do not see.
        """
        if cfg.num_experts is not None and cfg.gate_trees is not None:
            return
        start = starting_checkpoint(cfg, continue_once)
        found = read_checkpoint(start)["cfg"]["model"] if start is not None else {}
        if cfg.num_experts is None:
            cfg.num_experts = found.get("num_experts", DEFAULT_NUM_EXPERTS)
        if cfg.gate_trees is None:
            cfg.gate_trees = found.get("gate_trees", "")


def _set_sizes(arch: str, args: argparse.Namespace) -> None:
    """Fill in what the command line left open, as every fairseq architecture does."""
    for name, size in SWITCH_SIZES[arch].items():
        setattr(args, f"decoder_{name}", utils.safe_getattr(args, f"decoder_{name}", size))


for _arch in list(SWITCH_SIZES)[1:]:  # the first is registered with the model
    register_model_architecture("alma_switch_lm", _arch)(partial(_set_sizes, _arch))
