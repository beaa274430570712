"""One pre-norm layer of a language model's decoder: causal self-attention, then a dense or a Switch feed-forward part.

Letters: B sequences, T positions, M model dim, H heads.
"""

from typing import Callable, NamedTuple, Optional

import torch
import torch.nn.functional as F
from fairseq.incremental_decoding_utils import FairseqIncrementalState
from fairseq.modules import LayerNorm
from torch import Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.moe.gate import Routing
from fairseq_alma.moe.short_copies import Linear
from fairseq_alma.moe.switch_layer import SwitchLayer, SwitchStatistics
from fairseq_alma.text.dropout import AddKept, draw_kept, dropout, uses_short_numbers
from fairseq_alma.text.dropped_attention import DroppedCausalAttention

IncrementalState = dict[str, dict[str, Optional[Tensor]]]


class LayerShape(NamedTuple):
    """What all layers of one decoder share: sizes, dropout probabilities, capacity factors, activation.

    The last two are `maximal_update.UpdateFactors`: of what a layer norm gives, and of what is added to the residual.
    """

    model_dim: int
    ffn_dim: int
    num_heads: int
    dropout: float
    attention_dropout: float
    activation_dropout: float
    capacity_factor: float
    eval_capacity_factor: float
    activation: Callable[[Tensor], Tensor]
    feature_factor: float = 1.0
    branch_factor: float = 1.0


class CausalSelfAttention(FairseqIncrementalState, nn.Module):
    """Attend to the present and earlier positions, by PyTorch's fused kernels, with a cache for decoding step by step.

    Sequences must be padded on the right, as fairseq's language modeling data is: then no real position ever sees
    padding, and the kernels need no mask.

    Args:
        model_dim: M.
        num_heads: H; divides M.
        dropout: probability of dropping an attention weight.
    """

    get_incremental_state: Callable  # of FairseqIncrementalState; nn.Module hides their types from mypy
    set_incremental_state: Callable

    def __init__(self, model_dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv_proj = Linear(model_dim, 3 * model_dim)
        self.out_proj = Linear(model_dim, model_dim)
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
        if incremental_state is not None:
            key, value = self._extend_cache(key, value, incremental_state)
        probability = self.dropout if self.training else 0.0
        if incremental_state is None and uses_short_numbers(query, probability):
            out = DroppedCausalAttention.apply(query, key, value, probability)
        else:
            causal = incremental_state is None
            out = F.scaled_dot_product_attention(query, key, value, dropout_p=probability, is_causal=causal)
        return self.out_proj(out.transpose(1, 2).reshape(batch, length, model_dim))

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


class DecoderLayer(nn.Module):
    """Self-attention, then a feed-forward part, each behind a layer norm and beside a residual connection.

    Args:
        shape: sizes and probabilities.
        tree: the gate's choices of a Switch layer, or None for a dense feed-forward part.
    """

    zero: Tensor  # of `AddKept`; a GPU would have to make one for each gradient

    def __init__(self, shape: LayerShape, tree: Optional[GateTree]) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("zero", torch.zeros(1), persistent=False)
        self.self_attn = CausalSelfAttention(shape.model_dim, shape.num_heads, shape.attention_dropout)
        self.self_attn_layer_norm = LayerNorm(shape.model_dim)
        self.final_layer_norm = LayerNorm(shape.model_dim)
        if tree is None:
            self.switch = None
            self.fc1 = _linear(shape.model_dim, shape.ffn_dim)
            self.fc2 = _linear(shape.ffn_dim, shape.model_dim)
        else:
            self.switch = SwitchLayer(
                shape.model_dim,
                shape.ffn_dim,
                tree,
                shape.capacity_factor,
                shape.eval_capacity_factor,
                shape.activation,
                shape.activation_dropout,
            )

    def forward(
        self, x: Tensor, padding: Optional[Tensor], incremental_state: Optional[IncrementalState] = None
    ) -> tuple[Tensor, Optional[Routing], Optional[SwitchStatistics]]:
        """Apply the layer.

        Args:
            x: (B, T, M).
            padding: (B, T) bool, True where a token is padding, or None without padding.
            incremental_state: cache of the attention.

        Returns:
            (B, T, M), and of a Switch layer the routing of the B x T tokens (row by row) and its statistics.
        """
        kept = draw_kept(x, 2, self.shape.dropout, self.training)
        residual = x
        x = self.self_attn(scaled_norm(self.self_attn_layer_norm, x, self.shape.feature_factor), incremental_state)
        x = self._add(residual, x, kept[0])
        residual = x
        x = scaled_norm(self.final_layer_norm, x, self.shape.feature_factor)
        routing, statistics = None, None
        if self.switch is None:
            x = dropout(self.shape.activation(self.fc1(x)), self.shape.activation_dropout, self.training)
            x = self.fc2(x)
        else:
            flat_padding = None if padding is None else padding.flatten()
            flat, routing, statistics = self.switch(x.flatten(0, 1), flat_padding)
            x = flat.view_as(residual)
        return self._add(residual, x, kept[1]), routing, statistics

    def products(self) -> list[nn.Module]:
        """Return the modules that autocast computes in a short precision: all but layer norms and the gate."""
        return [self.self_attn, *([self.fc1, self.fc2] if self.switch is None else [self.switch.experts])]

    def _add(self, residual: Tensor, branch: Tensor, kept: Optional[Tensor]) -> Tensor:
        factor, probability = self.shape.branch_factor, self.shape.dropout
        if kept is not None:
            return AddKept.apply(residual, branch, kept, self.zero, factor / (1 - probability))
        return torch.add(residual, dropout(branch, probability, self.training), alpha=factor)


def scaled_norm(norm: nn.LayerNorm, x: Tensor, factor: float) -> Tensor:
    """Return the factor times what a layer norm gives, (…, M); the factor goes to its weights, which are few."""
    if factor == 1.0:
        return norm(x)
    return F.layer_norm(x, norm.normalized_shape, norm.weight * factor, norm.bias * factor, norm.eps)


def _linear(in_features: int, out_features: int) -> Linear:
    linear = Linear(in_features, out_features)
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
