"""``alma_switch_lm``: a decoder-only Transformer in which every second feed-forward layer is a Switch layer.

This architecture is the paper's model for text (v5, section 5): pre-norm, with shared input and output embeddings.
`SWITCH_SIZES` contains the paper's model sizes.
"""

import argparse
import math
from functools import partial
from typing import Any, Callable, Optional, Sequence

import torch.nn.functional as F
from fairseq import utils
from fairseq.data import Dictionary
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import Embedding
from fairseq.modules import PositionalEmbedding
from torch import Tensor, nn

from fairseq_alma.checkpoints.model_options import LANGUAGE, SWITCH_SIZES
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree, trees_of_layers
from fairseq_alma.moe import SwitchLayer
from fairseq_alma.text.transformer_lm import (
    CachedAttention,
    Decoder,
    DecoderLayer,
    IncrementalState,
    LanguageModel,
    LanguageModelConfig,
)
from fairseq_alma.training.stage_task import fairseq_config

AlmaSwitchLMConfig: Any = fairseq_config("AlmaSwitchLMConfig", LanguageModelConfig, LANGUAGE)


class CausalSelfAttention(CachedAttention):
    """Multi-head attention with one projection for queries, keys and values."""

    def __init__(self, model_dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.qkv_proj = nn.Linear(model_dim, 3 * model_dim)
        self.out_proj = nn.Linear(model_dim, model_dim)
        for weight in self.qkv_proj.weight.data.chunk(3):  # same initialization as in fairseq's MultiheadAttention
            nn.init.xavier_uniform_(weight, gain=2**-0.5)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.qkv_proj.bias)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: Tensor, state: Optional[IncrementalState]) -> Tensor:
        """Return the (B, T, M) output of self-attention for the (B, T, M) input."""
        qkv = self.qkv_proj(x).view(*x.shape[:2], 3, self.num_heads, -1)
        query, key, value = (each.transpose(1, 2) for each in qkv.unbind(2))  # three times (B, H, T, D)
        return self.out_proj(self.attend(query, key, value, state, self.dropout))


class SwitchDecoderLayer(DecoderLayer):
    """Transformer layer with layer norms; the FFN is a Switch layer if a gate tree is given, otherwise dense."""

    def __init__(self, cfg: Any, tree: Optional[GateTree]) -> None:
        super().__init__()
        model_dim, ffn_dim = cfg.decoder_embed_dim, cfg.decoder_ffn_embed_dim
        self.dropout, self.activation_dropout = cfg.dropout, cfg.activation_dropout
        # The gelu of fairseq would convert to fp32 and back.
        self.activation = F.gelu if cfg.activation_fn == "gelu" else utils.get_activation_fn(cfg.activation_fn)
        self.self_attn = CausalSelfAttention(model_dim, cfg.decoder_attention_heads, cfg.attention_dropout)
        self.self_attn_layer_norm = nn.LayerNorm(model_dim)
        self.final_layer_norm = nn.LayerNorm(model_dim)
        self.switch: Any = None
        if tree is None:
            self.fc1, self.fc2 = nn.Linear(model_dim, ffn_dim), nn.Linear(ffn_dim, model_dim)
            for linear in (self.fc1, self.fc2):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)
        else:
            self.switch = SwitchLayer(
                model_dim,
                ffn_dim,
                tree,
                cfg.capacity_factor,
                cfg.eval_capacity_factor,
                self.activation,
                self.activation_dropout,
            )

    def norms_and_ffn(self) -> tuple[nn.Module, nn.Module, Callable[..., Any]]:
        return self.self_attn_layer_norm, self.final_layer_norm, self.switch or self._dense

    def _dense(self, x: Tensor) -> Tensor:
        return self.fc2(F.dropout(self.activation(self.fc1(x)), self.activation_dropout, self.training))


class SwitchDecoder(Decoder):
    """Decoder with shared input and output embeddings and absolute position embeddings."""

    norm_name = "layer_norm"

    def __init__(self, dictionary: Dictionary, cfg: Any, max_positions: int) -> None:
        super().__init__(dictionary, cfg, max_positions)
        model_dim, heads = cfg.decoder_embed_dim, cfg.decoder_attention_heads
        if model_dim % heads:
            raise AlmaError(
                f"--decoder-attention-heads {heads}: must divide --decoder-embed-dim {model_dim}; give a divisor of "
                f"{model_dim}"
            )
        self.embed_scale = 1.0 if cfg.no_scale_embedding else math.sqrt(model_dim)
        self.embed_tokens = Embedding(len(dictionary), model_dim, self.padding_idx)
        self.embed_positions = PositionalEmbedding(
            max_positions, model_dim, self.padding_idx, learned=not cfg.decoder_sinusoidal_pos
        )
        self.layers = nn.ModuleList(SwitchDecoderLayer(cfg, tree) for tree in trees_of_layers(cfg))
        self.layer_norm = nn.LayerNorm(model_dim)
        self.output_projection = nn.Linear(model_dim, len(dictionary), bias=False)
        self.output_projection.weight = self.embed_tokens.weight

    def embed(self, tokens: Tensor, state: Optional[IncrementalState]) -> tuple[Tensor, Sequence[Tensor]]:
        positions = self.embed_positions(tokens, incremental_state=state)
        newest = tokens if state is None else tokens[:, -1:]
        return self.embed_scale * self.embed_tokens(newest) + positions, ()


@register_model("alma_switch_lm", dataclass=AlmaSwitchLMConfig)
class AlmaSwitchLM(LanguageModel):
    """Language model ``alma_switch_lm``: a Transformer decoder with Switch layers."""

    decoder_class, sizes, inherited = SwitchDecoder, SWITCH_SIZES, ("num_experts", "gate_trees")
    residual_outputs = ("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias", "fc2_weight", "fc2_bias")

    @staticmethod
    def fill_in_defaults(options: dict[str, Any], arch: str) -> None:
        for name, value in (("num_experts", 4), ("gate_trees", "")):
            options[name] = value if options[name] is None else options[name]


def _set_sizes(arch: str, args: argparse.Namespace) -> None:
    for name, size in SWITCH_SIZES[arch].items():
        setattr(args, f"decoder_{name}", utils.safe_getattr(args, f"decoder_{name}", size))


for _arch in list(SWITCH_SIZES)[1:]:  # the first architecture is registered with the model
    register_model_architecture("alma_switch_lm", _arch)(partial(_set_sizes, _arch))
