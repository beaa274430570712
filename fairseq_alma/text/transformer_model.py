"""``alma_transformer_lm``: the default language model, dense or with experts, with its options and named sizes."""

from dataclasses import dataclass
from typing import Any, Mapping, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqLanguageModel, register_model, register_model_architecture
from fairseq.tasks import FairseqTask
from omegaconf import II
from torch import Tensor, nn

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.checkpoints.model_options import (
    ALMA_TRANSFORMER,
    TRANSFORMER_SIZES,
    Beginning,
    complete_sizes,
    starting_checkpoint,
)
from fairseq_alma.data.tokens import absent_ids
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import trees_of_layers
from fairseq_alma.moe.switch_layer import SwitchLayer
from fairseq_alma.options import options_of
from fairseq_alma.text.transformer import AlmaTransformerDecoder, TransformerShape
from fairseq_alma.training.fairseq_options import check_options, fairseq_config

_Options: Any = fairseq_config("AlmaTransformer", FairseqDataclass, ALMA_TRANSFORMER)


@dataclass
class AlmaTransformerLMConfig(_Options, Beginning):
    """Options of ``alma_transformer_lm``."""

    # None where the task has no such option, which build_model refuses.
    tokens_per_sample: Optional[int] = II("oc.select:task.tokens_per_sample")
    max_target_positions: Optional[int] = II("oc.select:task.max_target_positions")


@register_model("alma_transformer_lm", dataclass=AlmaTransformerLMConfig)
class AlmaTransformerLM(FairseqLanguageModel):
    """A language model of today's parts, for ``--task alma_lm``; see `text.transformer`.

    Args:
        decoder: the model itself.
        balance_loss_weight: what the criterion multiplies the load-balancing loss with.
        is_compiled: whether the criterion lets ``torch.compile`` fuse what both do in training.
    """

    residual_outputs = ("o_proj.weight", "down_proj.weight", "experts.down_proj")
    """Endings of the names of the weights that write to the residual stream; zero in a new layer."""

    def __init__(self, decoder: AlmaTransformerDecoder, balance_loss_weight: float, is_compiled: bool = False) -> None:
        super().__init__(decoder)
        self.balance_loss_weight = balance_loss_weight
        self.is_compiled = is_compiled
        mark_for_optimizers(self)

    @classmethod
    def build_model(cls, cfg: AlmaTransformerLMConfig, task: FairseqTask) -> "AlmaTransformerLM":
        """Build the model that the options describe.

        Raises:
            AlmaError: if options do not fit together, or the checkpoint to start from cannot be read.
        """
        cls.complete_options(cfg)
        check_options(cfg)
        max_positions = cfg.max_target_positions or cfg.tokens_per_sample
        if max_positions is None:
            raise AlmaError("--tokens-per-sample: the task has no such option; give --task alma_lm")
        shape = TransformerShape(
            model_dim=cfg.decoder_embed_dim,
            ffn_dim=cfg.decoder_ffn_embed_dim,
            num_heads=cfg.decoder_attention_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            rope_theta=cfg.rope_theta,
            norm_eps=cfg.norm_eps,
            dropout=cfg.dropout,
            capacity_factor=cfg.capacity_factor,
            eval_capacity_factor=cfg.eval_capacity_factor,
        )
        decoder = AlmaTransformerDecoder(
            task.source_dictionary,
            shape,
            trees_of_layers(cfg) if cfg.num_experts > 1 else [None] * cfg.decoder_layers,
            max_positions,
            cfg.share_decoder_input_output_embed,
            not cfg.no_embedding_norm,
            cfg.checkpoint_activations,
            absent_ids(cfg.symbol_ids) if cfg.symbol_ids else (),
        )
        return cls(decoder, cfg.balance_loss_weight, cfg.compile)

    @classmethod
    def complete_options(cls, cfg: AlmaTransformerLMConfig, continue_once: Optional[str] = None) -> None:
        """Fill in what the command line left open: as in the checkpoint to start from, else the defaults.

        Args:
            cfg: filled in here.
            continue_once: value of ``--continue-once``, which models do not see.
        """
        names = [name for each in ALMA_TRANSFORMER for name, option in options_of(each).items() if option.shape]
        options = {name: cfg[name] for name in names}
        start = starting_checkpoint(cfg, continue_once)
        found = read_checkpoint(start)["cfg"]["model"] if start is not None and None in options.values() else {}
        if found.get("_name") in TRANSFORMER_SIZES:
            options = {
                name: found[name] if given is None or given is False else given for name, given in options.items()
            }
        complete_sizes(options, cfg._name if cfg._name in TRANSFORMER_SIZES else "alma_transformer_lm")
        for name, value in options.items():
            cfg[name] = value

    def output_factors(self, features: Tensor, extra: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return two tensors whose product is the logits: features (…, M) and the output projection (V, M).

        Args:
            features: what the model gives with ``features_only``.
            extra: what else it gives then.
        """
        return features, self.decoder.output_projection.weight


def mark_for_optimizers(model: nn.Module) -> None:
    """Set ``param_group`` of parameters that optimizers here treat in a way of their own; see `optim.muon`."""
    decoder = model.decoder
    decoder.output_projection.weight.param_group = "adam"
    if decoder.output_projection.weight is not decoder.embed_tokens.weight:
        decoder.embed_tokens.weight.param_group = "embedding"
    for module in decoder.modules():
        if isinstance(module, SwitchLayer):
            module.gate.weight.param_group = "adam"


for _arch in list(TRANSFORMER_SIZES)[1:]:  # the first is registered with the model
    register_model_architecture("alma_transformer_lm", _arch)(lambda args: None)  # `complete_options` knows the sizes
