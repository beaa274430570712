"""The decoder of the Switch language model: pre-norm Transformer layers with dense or Switch feed-forward parts.

Letters: B sequences, T positions, M model dim, H heads, V vocabulary size.
"""

import math
from typing import TYPE_CHECKING, Any, Optional

import torch.nn.functional as F
from fairseq import utils
from fairseq.data import Dictionary
from fairseq.models.transformer import Embedding
from fairseq.modules import PositionalEmbedding
from torch import Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree, trees_of_layers
from fairseq_alma.moe.gate import Routing
from fairseq_alma.moe.switch_layer import SwitchLayer, SwitchStatistics
from fairseq_alma.text.feature_decoder import CachedAttention, FeatureDecoder, IncrementalState

if TYPE_CHECKING:
    from fairseq_alma.text.model import AlmaSwitchLMConfig


class CausalSelfAttention(CachedAttention):
    """Attend to the present and earlier positions, with a cache for decoding step by step.

    Sequences must be padded on the right, as fairseq's language modeling data is: then no real position sees padding.

    Args:
        model_dim: M.
        num_heads: H; divides M.
        dropout: probability of dropping an attention weight.
    """

    def __init__(self, model_dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv_proj = nn.Linear(model_dim, 3 * model_dim)
        self.out_proj = nn.Linear(model_dim, model_dim)
        for weight in self.qkv_proj.weight.data.chunk(3):  # as fairseq's MultiheadAttention initialises them
            nn.init.xavier_uniform_(weight, gain=2**-0.5)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.qkv_proj.bias)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: Tensor, incremental_state: Optional[IncrementalState] = None) -> Tensor:
        """Attend.

        Args:
            x: (B, T, M); with a state, the newest position alone (T = 1).
            incremental_state: keys and values of earlier positions, extended in place.

        Returns:
            (B, T, M).
        """
        batch, length, model_dim = x.shape
        qkv = self.qkv_proj(x).view(batch, length, 3, self.num_heads, model_dim // self.num_heads)
        query, key, value = (each.transpose(1, 2) for each in qkv.unbind(2))  # three times (B, H, T, M/H)
        key, value = self.extend_cache(key, value, incremental_state)
        probability = self.dropout if self.training else 0.0
        is_causal = incremental_state is None
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=probability, is_causal=is_causal)
        return self.out_proj(out.transpose(1, 2).reshape(batch, length, model_dim))


class DecoderLayer(nn.Module):
    """Self-attention, then a feed-forward part, each after a layer norm and with a residual connection.

    Args:
        cfg: options of the model.
        tree: the gate's choices of a Switch layer, or None for a dense feed-forward part.
    """

    def __init__(self, cfg: "AlmaSwitchLMConfig", tree: Optional[GateTree]) -> None:
        super().__init__()
        model_dim, ffn_dim = cfg.decoder_embed_dim, cfg.decoder_ffn_embed_dim
        self.dropout, self.activation_dropout = cfg.dropout, cfg.activation_dropout
        # fairseq's own gelu copies to fp32 and back
        self.activation = F.gelu if cfg.activation_fn == "gelu" else utils.get_activation_fn(cfg.activation_fn)
        self.self_attn = CausalSelfAttention(model_dim, cfg.decoder_attention_heads, cfg.attention_dropout)
        self.self_attn_layer_norm = nn.LayerNorm(model_dim)
        self.final_layer_norm = nn.LayerNorm(model_dim)
        if tree is None:
            self.switch = None
            self.fc1, self.fc2 = nn.Linear(model_dim, ffn_dim), nn.Linear(ffn_dim, model_dim)
            for linear in (self.fc1, self.fc2):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)
        else:
            factors = cfg.capacity_factor, cfg.eval_capacity_factor
            self.switch = SwitchLayer(model_dim, ffn_dim, tree, *factors, self.activation, self.activation_dropout)

    def forward(
        self, x: Tensor, padding: Tensor, incremental_state: Optional[IncrementalState] = None
    ) -> tuple[Tensor, Optional[Routing], Optional[SwitchStatistics]]:
        """Apply the layer.

        Args:
            x: (B, T, M).
            padding: (B, T) bool, True where a token is padding.
            incremental_state: cache of the attention.

        Returns:
            (B, T, M), and of a Switch layer the routing of the B x T tokens (row by row) and its statistics.
        """
        branch = self.self_attn(self.self_attn_layer_norm(x), incremental_state)
        x = x + F.dropout(branch, self.dropout, self.training)
        normed = self.final_layer_norm(x)
        routing, statistics = None, None
        if self.switch is None:
            hidden = F.dropout(self.activation(self.fc1(normed)), self.activation_dropout, self.training)
            branch = self.fc2(hidden)
        else:
            out, routing, statistics = self.switch(normed.flatten(0, 1), padding.flatten())
            branch = out.view_as(normed)
        return x + F.dropout(branch, self.dropout, self.training), routing, statistics


class SwitchDecoder(FeatureDecoder):
    """A pre-norm Transformer decoder with shared input and output embeddings.

    Args:
        cfg: options of the model.
        dictionary: the vocabulary.
        max_positions: longest sequence, in tokens.
    """

    def __init__(self, cfg: "AlmaSwitchLMConfig", dictionary: Dictionary, max_positions: int) -> None:
        super().__init__(dictionary, max_positions, cfg.checkpoint_activations)
        model_dim, self.dropout = cfg.decoder_embed_dim, cfg.dropout
        self.embed_scale = 1.0 if cfg.no_scale_embedding else math.sqrt(model_dim)
        self.embed_tokens = Embedding(len(dictionary), model_dim, self.padding_idx)
        is_learned = not cfg.decoder_sinusoidal_pos
        self.embed_positions = PositionalEmbedding(max_positions, model_dim, self.padding_idx, is_learned)
        self.layers = nn.ModuleList(DecoderLayer(cfg, tree) for tree in trees_of_layers(cfg))
        self.layer_norm = nn.LayerNorm(model_dim)
        self.output_projection = nn.Linear(model_dim, len(dictionary), bias=False)
        self.output_projection.weight = self.embed_tokens.weight

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: Optional[IncrementalState] = None,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the (B, T, M) features; arguments as in `FeatureDecoder.forward`."""
        positions = self.embed_positions(prev_output_tokens, incremental_state=incremental_state)
        if incremental_state is not None:
            prev_output_tokens = prev_output_tokens[:, -1:]
        x = self.embed_scale * self.embed_tokens(prev_output_tokens) + positions
        x = F.dropout(x, self.dropout, self.training)
        x, extra = self.apply_layers(x, prev_output_tokens.eq(self.padding_idx), incremental_state)
        return self.layer_norm(x), extra

    def max_positions(self) -> int:
        """Return the longest sequence that the positions allow, in tokens."""
        return min(self.max_target_positions, self.embed_positions.max_positions)
