"""The decoder of ``alma_transformer_lm``: RMS norms, rotary positions, SwiGLU; dense, or with Switch layers.

Modules have the names and compute the functions of transformers' Qwen3 (dense) and Qwen3-MoE, so that exporting renames
weights. Matrices begin uniform with variance 1 / inputs, those that write to the residual stream as zero, embeddings
standard normal, the output projection almost zero: the first loss is log V.

Letters: B sequences, T positions, S = B x T tokens, M model dim, H query heads, K key-value heads, D head dim,
V vocabulary size.
"""

from typing import TYPE_CHECKING, Any, Optional, Sequence

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from torch import Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.moe.gate import Routing
from fairseq_alma.moe.switch_layer import SwitchLayer, SwitchStatistics
from fairseq_alma.text.feature_decoder import CachedAttention, FeatureDecoder, IncrementalState

if TYPE_CHECKING:
    from fairseq_alma.text.transformer_model import AlmaTransformerLMConfig

Rotary = tuple[Tensor, Tensor]


def uniform_linear(in_features: int, out_features: int) -> nn.Linear:
    """Return a linear map without bias, its weights as `draw_uniform` draws them."""
    linear = nn.Linear(in_features, out_features, bias=False)
    draw_uniform(linear.weight)
    return linear


def draw_uniform(weight: Tensor) -> None:
    """Draw weights (…, inputs) with variance 1 / inputs, in place."""
    bound = (3 / weight.size(-1)) ** 0.5
    nn.init.uniform_(weight, -bound, bound)


def zero_linear(in_features: int, out_features: int) -> nn.Linear:
    """Return a linear map without bias whose weights are zero."""
    linear = nn.Linear(in_features, out_features, bias=False)
    nn.init.zeros_(linear.weight)
    return linear


def rotary_table(start: int, stop: int, head_dim: int, theta: float, device: torch.device) -> Rotary:
    """Return cosines and sines, (T, 1, D / 2) fp32 each, of the angles of positions ``start`` to ``stop`` - 1."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(start, stop, device=device, dtype=torch.float32)
    angles = torch.outer(positions, theta**-exponents).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads (B, T, H, D) by the angles of their positions; pairs are (i, i + D/2), as Qwen3's rotate_half."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class GroupedQueryAttention(CachedAttention):
    """Attend to the present and earlier positions; queries and keys are normed, then rotated.

    Sequences must be padded on the right, as fairseq's language modeling data is: then no real position sees padding.

    Args:
        cfg: options of the model.
    """

    def __init__(self, cfg: "AlmaTransformerLMConfig") -> None:
        super().__init__()
        self.head_dim, model_dim = cfg.head_dim, cfg.decoder_embed_dim
        self.is_grouped = cfg.num_kv_heads != cfg.decoder_attention_heads
        query_dim, kv_dim = cfg.decoder_attention_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        self.q_proj = uniform_linear(model_dim, query_dim)
        self.k_proj = uniform_linear(model_dim, kv_dim)
        self.v_proj = uniform_linear(model_dim, kv_dim)
        self.o_proj = zero_linear(query_dim, model_dim)
        self.q_norm = nn.RMSNorm(cfg.head_dim, cfg.norm_eps)
        self.k_norm = nn.RMSNorm(cfg.head_dim, cfg.norm_eps)

    def forward(self, x: Tensor, rotary: Rotary, incremental_state: Optional[IncrementalState] = None) -> Tensor:
        """Attend.

        Args:
            x: (B, T, M); with a state, the newest position alone (T = 1).
            rotary: of these positions.
            incremental_state: keys and values of earlier positions, extended in place.

        Returns:
            (B, T, M).
        """
        heads = (*x.shape[:2], -1, self.head_dim)
        query = rotate(self.q_norm(self.q_proj(x).view(heads)), *rotary).transpose(1, 2)  # (B, H, T, D)
        key = rotate(self.k_norm(self.k_proj(x).view(heads)), *rotary).transpose(1, 2)  # (B, K, T, D)
        value = self.v_proj(x).view(heads).transpose(1, 2)
        key, value = self.extend_cache(key, value, incremental_state)
        is_causal = incremental_state is None
        out = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=self.is_grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class GatedFeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``, without biases (Shazeer 2020)."""

    def __init__(self, model_dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate_proj = uniform_linear(model_dim, ffn_dim)
        self.up_proj = uniform_linear(model_dim, ffn_dim)
        self.down_proj = zero_linear(ffn_dim, model_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, M) to (…, M)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class AlmaTransformerLayer(nn.Module):
    """Self-attention, then a feed-forward part, each after a norm and added to the residual stream.

    Args:
        cfg: options of the model.
        tree: the gate's choices of a Switch layer, or None for a dense feed-forward part.
    """

    def __init__(self, cfg: "AlmaTransformerLMConfig", tree: Optional[GateTree]) -> None:
        super().__init__()
        model_dim, ffn_dim, self.dropout = cfg.decoder_embed_dim, cfg.decoder_ffn_embed_dim, cfg.dropout
        self.input_layernorm = nn.RMSNorm(model_dim, cfg.norm_eps)
        self.self_attn = GroupedQueryAttention(cfg)
        self.post_attention_layernorm = nn.RMSNorm(model_dim, cfg.norm_eps)
        self.mlp: Any
        if tree is None:
            self.mlp = GatedFeedForward(model_dim, ffn_dim)
        else:
            factors = cfg.capacity_factor, cfg.eval_capacity_factor
            self.mlp = SwitchLayer(model_dim, ffn_dim, tree, *factors, gated=True)
            draw_uniform(self.mlp.experts.gate_proj)
            draw_uniform(self.mlp.experts.up_proj)

    def forward(
        self, x: Tensor, rotary: Rotary, padding: Tensor, incremental_state: Optional[IncrementalState] = None
    ) -> tuple[Tensor, Optional[Routing], Optional[SwitchStatistics]]:
        """Apply the layer.

        Args:
            x: (B, T, M).
            rotary: of the T positions.
            padding: (B, T) bool, True where a token is padding.
            incremental_state: cache of the attention.

        Returns:
            (B, T, M), and of a Switch layer the routing of the S tokens (row by row) and its statistics.
        """
        branch = self.self_attn(self.input_layernorm(x), rotary, incremental_state)
        x = x + F.dropout(branch, self.dropout, self.training)
        normed = self.post_attention_layernorm(x)
        routing, statistics = None, None
        if isinstance(self.mlp, SwitchLayer):
            flat, routing, statistics = self.mlp(normed.flatten(0, 1), padding.flatten())
            branch = flat.view_as(x)
        else:
            branch = self.mlp(normed)
        return x + F.dropout(branch, self.dropout, self.training), routing, statistics


class AlmaTransformerDecoder(FeatureDecoder):
    """Embeddings, layers, a last norm, and the projection onto the vocabulary.

    Args:
        cfg: options of the model.
        dictionary: the vocabulary.
        trees: for every layer the gate's choices, or None for a dense layer.
        max_positions: longest sequence, in tokens.
        absent_ids: tokens that never take part in a softmax.
    """

    def __init__(
        self,
        cfg: "AlmaTransformerLMConfig",
        dictionary: Dictionary,
        trees: Sequence[Optional[GateTree]],
        max_positions: int,
        absent_ids: Sequence[int] = (),
    ) -> None:
        super().__init__(dictionary, max_positions, cfg.checkpoint_activations)
        model_dim, self.norm_eps, self.dropout = cfg.decoder_embed_dim, cfg.norm_eps, cfg.dropout
        self.head_dim, self.rope_theta = cfg.head_dim, cfg.rope_theta
        self.norms_embeddings = not cfg.no_embedding_norm
        self.embed_tokens = nn.Embedding(len(dictionary), model_dim)
        self.layers = nn.ModuleList(AlmaTransformerLayer(cfg, tree) for tree in trees)
        self.norm = nn.RMSNorm(model_dim, cfg.norm_eps)
        self.output_projection = nn.Linear(model_dim, len(dictionary), bias=False)
        if cfg.share_decoder_input_output_embed:
            self.output_projection.weight = self.embed_tokens.weight
            # A token's own logit begins near std * M, as the layers add nothing yet.
            nn.init.normal_(self.embed_tokens.weight, std=min(0.02, 1 / model_dim))
        else:
            nn.init.normal_(self.embed_tokens.weight)
            nn.init.normal_(self.output_projection.weight, std=0.001)
        bias = torch.zeros(len(dictionary)).index_fill_(0, torch.tensor(absent_ids), -1e9) if absent_ids else None
        self.register_buffer("logit_bias", bias, persistent=False)

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: Optional[IncrementalState] = None,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the (B, T, M) features; arguments as in `FeatureDecoder.forward`."""
        start, stop = 0, prev_output_tokens.size(1)
        if incremental_state is not None:
            start, prev_output_tokens = stop - 1, prev_output_tokens[:, -1:]
        rotary = rotary_table(start, stop, self.head_dim, self.rope_theta, prev_output_tokens.device)
        x = self.embed_tokens(prev_output_tokens)
        if self.norms_embeddings:
            x = F.rms_norm(x, x.shape[-1:], eps=self.norm_eps)
        x = F.dropout(x, self.dropout, self.training)
        x, extra = self.apply_layers(x, rotary, prev_output_tokens.eq(self.padding_idx), incremental_state)
        return self.norm(x), extra

    def output_layer(self, features: Tensor, **unused: Any) -> Tensor:
        """Project (…, M) features to (…, V) logits."""
        return F.linear(features, self.output_projection.weight, self.logit_bias)
