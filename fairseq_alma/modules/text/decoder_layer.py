"""One pre-norm layer of a language model's decoder, with a dense or a Switch feed-forward part.

Letters: B sequences, T positions, M model dim.
"""

from typing import Callable, NamedTuple, Optional

import torch.nn.functional as F
from fairseq.modules import LayerNorm
from torch import Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.modules.moe.gate import Routing
from fairseq_alma.modules.moe.switch_layer import SwitchLayer, SwitchStatistics
from fairseq_alma.modules.text.causal_self_attention import CausalSelfAttention, IncrementalState


class LayerShape(NamedTuple):
    """What all layers of one decoder share: sizes, dropout probabilities, capacity factors, activation."""

    model_dim: int
    ffn_dim: int
    num_heads: int
    dropout: float
    attention_dropout: float
    activation_dropout: float
    capacity_factor: float
    eval_capacity_factor: float
    activation: Callable[[Tensor], Tensor]


class DecoderLayer(nn.Module):
    """Self-attention, then a feed-forward part, each behind a layer norm and beside a residual connection.

    Args:
        shape: sizes and probabilities.
        tree: the gate's choices of a Switch layer, or None for a dense feed-forward part.
    """

    def __init__(self, shape: LayerShape, tree: Optional[GateTree]) -> None:
        super().__init__()
        self.shape = shape
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
        residual = x
        x = self.self_attn(self.self_attn_layer_norm(x), incremental_state)
        x = residual + F.dropout(x, self.shape.dropout, self.training)
        residual = x
        x = self.final_layer_norm(x)
        routing, statistics = None, None
        if self.switch is None:
            x = F.dropout(self.shape.activation(self.fc1(x)), self.shape.activation_dropout, self.training)
            x = self.fc2(x)
        else:
            flat_padding = None if padding is None else padding.flatten()
            flat, routing, statistics = self.switch(x.flatten(0, 1), flat_padding)
            x = flat.view_as(residual)
        return residual + F.dropout(x, self.shape.dropout, self.training), routing, statistics


def _linear(in_features: int, out_features: int) -> nn.Linear:
    linear = nn.Linear(in_features, out_features)
    nn.init.xavier_uniform_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
