"""Causal self-attention through PyTorch's fused kernels, with a cache for decoding step by step.

Letters: B sequences, T positions, M model dim, H heads.
"""

from typing import Callable, Optional

import torch
import torch.nn.functional as F
from fairseq.incremental_decoding_utils import FairseqIncrementalState
from torch import Tensor, nn

IncrementalState = dict[str, dict[str, Optional[Tensor]]]


class CausalSelfAttention(FairseqIncrementalState, nn.Module):
    """Attend to the present and earlier positions.

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
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # three times (B, H, T, M/H)
        if incremental_state is not None:
            key, value = self._extend_cache(key, value, incremental_state)
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=incremental_state is None,
        )
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
