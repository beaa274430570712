"""The decoder of ``alma_transformer_lm``: RMS norms, rotary positions, SwiGLU; dense, or with Switch layers.

Modules have the names and compute the functions of transformers' Qwen3 (dense) and Qwen3-MoE, so that exporting renames
weights. Matrices begin uniform with variance 1 / inputs, those that write to the residual stream as zero, embeddings
standard normal, the output projection almost zero: the first loss is log V.

Letters: B sequences, T positions, S = B x T tokens, M model dim, H query heads, K key-value heads, D head dim,
F feed-forward dim, V vocabulary size.
"""

from dataclasses import dataclass
from typing import Any, Optional, Sequence

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from fairseq.data import Dictionary
from fairseq.incremental_decoding_utils import FairseqIncrementalState
from fairseq.models import FairseqIncrementalDecoder
from torch import Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.moe.gate import Routing
from fairseq_alma.moe.switch_layer import SwitchLayer, SwitchStatistics

IncrementalState = dict[str, dict[str, Optional[Tensor]]]
Rotary = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TransformerShape:
    """Sizes that all layers of a decoder share.

    Attributes:
        model_dim: M.
        ffn_dim: F.
        num_heads: H.
        num_kv_heads: K; divides H.
        head_dim: D, even.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in RMS norms.
        dropout: probability, of embeddings and of what is added to the residual stream.
        capacity_factor: of Switch layers in training; 0: no limit.
        eval_capacity_factor: of Switch layers at test.
    """

    model_dim: int
    ffn_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    dropout: float = 0.0
    capacity_factor: float = 1.0
    eval_capacity_factor: float = 0.0


def uniform_linear(in_features: int, out_features: int) -> nn.Linear:
    """Return a linear map without bias whose weights have variance 1 / inputs."""
    linear = nn.Linear(in_features, out_features, bias=False)
    draw_uniform(linear.weight)
    return linear


def draw_uniform(weight: Tensor) -> None:
    """Draw weights (…, inputs) with variance 1 / inputs, in place."""
    bound = (3 / weight.size(-1)) ** 0.5
    nn.init.uniform_(weight, -bound, bound)


def rotary_table(start: int, stop: int, head_dim: int, theta: float, device: torch.device) -> Rotary:
    """Return cosines and sines, (T, 1, D / 2) fp32 each, of the angles of positions ``start`` to ``stop`` - 1."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(start, stop, device=device, dtype=torch.float32), theta**-exponents).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads (B, T, H, D) by the angles of their positions; pairs are (i, i + D/2), as Qwen3's rotate_half."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class CausalSelfAttention(FairseqIncrementalState, nn.Module):
    """Attend to the present and earlier positions; queries and keys are normed, then rotated.

    Sequences are padded on the right, as fairseq's language modeling data is: no real position sees padding.
    """

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.is_grouped = shape.num_kv_heads != shape.num_heads
        kv_dim = shape.num_kv_heads * shape.head_dim
        self.q_proj = uniform_linear(shape.model_dim, shape.num_heads * shape.head_dim)
        self.k_proj = uniform_linear(shape.model_dim, kv_dim)
        self.v_proj = uniform_linear(shape.model_dim, kv_dim)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.model_dim, bias=False)
        nn.init.zeros_(self.o_proj.weight)
        self.q_norm = nn.RMSNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, shape.norm_eps)

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
        if incremental_state is not None:
            key, value = self._extend_cache(key, value, incremental_state)
        is_causal = incremental_state is None
        out = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=self.is_grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _extend_cache(self, key: Tensor, value: Tensor, incremental_state: IncrementalState) -> tuple[Tensor, Tensor]:
        cached = self.get_incremental_state(incremental_state, "attn_state")
        if cached is not None:
            key = torch.cat([cached["key"], key], dim=2)
            value = torch.cat([cached["value"], value], dim=2)
        self.set_incremental_state(incremental_state, "attn_state", {"key": key, "value": value})
        return key, value

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> None:
        """Reorder the cache as beam search reorders its hypotheses; fairseq calls this."""
        cached = self.get_incremental_state(incremental_state, "attn_state")
        if cached is not None:
            reordered = {name: tensor.index_select(0, new_order) for name, tensor in cached.items()}
            self.set_incremental_state(incremental_state, "attn_state", reordered)


class GatedFeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``, without biases (Shazeer 2020)."""

    def __init__(self, model_dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate_proj = uniform_linear(model_dim, ffn_dim)
        self.up_proj = uniform_linear(model_dim, ffn_dim)
        self.down_proj = nn.Linear(ffn_dim, model_dim, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, M) to (…, M)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class AlmaTransformerLayer(nn.Module):
    """Self-attention, then a feed-forward part, each behind a norm and added to the residual stream.

    Args:
        shape: sizes.
        tree: the gate's choices of a Switch layer, or None for a dense feed-forward part.
    """

    def __init__(self, shape: TransformerShape, tree: Optional[GateTree]) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.input_layernorm = nn.RMSNorm(shape.model_dim, shape.norm_eps)
        self.self_attn = CausalSelfAttention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.model_dim, shape.norm_eps)
        self.mlp: nn.Module
        if tree is None:
            self.mlp = GatedFeedForward(shape.model_dim, shape.ffn_dim)
        else:
            factors = shape.capacity_factor, shape.eval_capacity_factor
            self.mlp = SwitchLayer(shape.model_dim, shape.ffn_dim, tree, *factors, gated=True)
            draw_uniform(self.mlp.experts.gate_proj)
            draw_uniform(self.mlp.experts.up_proj)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        padding: Optional[Tensor] = None,
        incremental_state: Optional[IncrementalState] = None,
    ) -> tuple[Tensor, Optional[Routing], Optional[SwitchStatistics]]:
        """Apply the layer.

        Args:
            x: (B, T, M).
            rotary: of the T positions.
            padding: (S,) bool, True where a token is padding; None: nowhere.
            incremental_state: cache of the attention.

        Returns:
            (B, T, M), and of a Switch layer the routing of the S tokens (row by row) and its statistics.
        """
        branch = self.self_attn(self.input_layernorm(x), rotary, incremental_state)
        x = x + F.dropout(branch, self.dropout, self.training)
        normed = self.post_attention_layernorm(x)
        routing, statistics = None, None
        if isinstance(self.mlp, SwitchLayer):
            flat, routing, statistics = self.mlp(normed.flatten(0, 1), padding)
            branch = flat.view_as(x)
        else:
            branch = self.mlp(normed)
        return x + F.dropout(branch, self.dropout, self.training), routing, statistics


class AlmaTransformerDecoder(FairseqIncrementalDecoder):
    """Embeddings, layers, a last norm, and the projection onto the vocabulary.

    Args:
        dictionary: the vocabulary.
        shape: sizes of the layers.
        trees: for every layer the gate's choices, or None for a dense layer.
        max_positions: longest sequence, in tokens.
        shares_embeddings: use the input embeddings as output projection.
        norms_embeddings: divide each embedding by its root mean square.
        checkpoint_activations: recompute the layers in the backward pass to save memory.
        absent_ids: tokens that never take part in a softmax.
    """

    logit_bias: Optional[Tensor]

    def __init__(
        self,
        dictionary: Dictionary,
        shape: TransformerShape,
        trees: Sequence[Optional[GateTree]],
        max_positions: int,
        shares_embeddings: bool = False,
        norms_embeddings: bool = True,
        checkpoint_activations: bool = False,
        absent_ids: Sequence[int] = (),
    ) -> None:
        super().__init__(dictionary)
        self.shape = shape
        self.padding_idx = dictionary.pad()
        self.max_target_positions = max_positions
        self.norms_embeddings = norms_embeddings
        self.checkpoint_activations = checkpoint_activations
        self.embed_tokens = nn.Embedding(len(dictionary), shape.model_dim)
        self.layers = nn.ModuleList(AlmaTransformerLayer(shape, tree) for tree in trees)
        self.norm = nn.RMSNorm(shape.model_dim, shape.norm_eps)
        self.output_projection = nn.Linear(shape.model_dim, len(dictionary), bias=False)
        if shares_embeddings:
            self.output_projection.weight = self.embed_tokens.weight
            # A token's own logit begins near std * M, as the layers add nothing yet.
            nn.init.normal_(self.embed_tokens.weight, std=min(0.02, 1 / shape.model_dim))
        else:
            nn.init.normal_(self.embed_tokens.weight)
            nn.init.normal_(self.output_projection.weight, std=0.001)
        bias = torch.zeros(len(dictionary)).index_fill_(0, torch.tensor(absent_ids), -1e9) if absent_ids else None
        self.register_buffer("logit_bias", bias, persistent=False)

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: Optional[IncrementalState] = None,
        features_only: bool = False,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Predict the next token at every position.

        Args:
            prev_output_tokens: (B, T) int64, padded on the right.
            encoder_out: unused; fairseq passes it to every decoder.
            incremental_state: cache of earlier positions; then only the newest position is computed (T = 1).
            features_only: return the (B, T, M) input of the output layer rather than its (B, T, V) output.
            unused: further arguments of fairseq's generator (``src_lengths``).

        Returns:
            Logits or features, and a dictionary with ``routing`` and ``switch`` (`SwitchStatistics`), one entry for
            each Switch layer.
        """
        features, extra = self.extract_features(prev_output_tokens, encoder_out, incremental_state)
        return (features if features_only else self.output_layer(features)), extra

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: Optional[IncrementalState] = None,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the (B, T, M) features; arguments as in `forward`."""
        start, stop = 0, prev_output_tokens.size(1)
        if incremental_state is not None:
            start, prev_output_tokens = stop - 1, prev_output_tokens[:, -1:]
        shape, device = self.shape, prev_output_tokens.device
        rotary = rotary_table(start, stop, shape.head_dim, shape.rope_theta, device)
        padding = prev_output_tokens.eq(self.padding_idx).flatten()
        x = self.embed_tokens(prev_output_tokens)
        if self.norms_embeddings:
            x = F.rms_norm(x, (shape.model_dim,), eps=shape.norm_eps)
        x = F.dropout(x, shape.dropout, self.training)
        extra: dict[str, Any] = {"attn": [None], "routing": [], "switch": []}
        for layer in self.layers:
            if self.checkpoint_activations and self.training:
                found = torch.utils.checkpoint.checkpoint(layer, x, rotary, padding, use_reentrant=False)
            else:
                found = layer(x, rotary, padding, incremental_state)
            x, routing, statistics = found
            if routing is not None:
                extra["routing"].append(routing)
                extra["switch"].append(statistics)
        return self.norm(x), extra

    def output_layer(self, features: Tensor, **unused: Any) -> Tensor:
        """Project (…, M) features to (…, V) logits."""
        return F.linear(features, self.output_projection.weight, self.logit_bias)

    def max_positions(self) -> int:
        """Return the longest sequence that training or the task allows, in tokens."""
        return self.max_target_positions
