"""Parameters and operations of a language model, and bits per byte.

Of operations a multiplication and an addition count as two; only matrix products count, as in
``torch.utils.flop_counter``. A backward pass costs two forward passes.

Letters: M model dim, F feed-forward dim, V vocabulary, T sequence length, E experts, R rows of a gate.
"""

from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class SwitchLMShape:
    """Sizes of a Switch language model.

    Attributes:
        model_dim: M.
        ffn_dim: F.
        num_layers: all layers, dense and Switch.
        vocab_size: V, fairseq's four special symbols included.
        tokens_per_sample: T, length of a training or test sequence.
        gate_rows: R of each Switch layer; E for a flat gate.
        num_experts: E of each Switch layer.
        learned_positions: rows of the table of learned positions; 0 for sinusoidal ones.
    """

    model_dim: int
    ffn_dim: int
    num_layers: int
    vocab_size: int
    tokens_per_sample: int
    gate_rows: tuple[int, ...]
    num_experts: tuple[int, ...]
    learned_positions: int

    @property
    def num_params(self) -> int:
        """Parameters, shared ones once."""
        m, f = self.model_dim, self.ffn_dim
        ffn = 2 * m * f + f + m
        layer_norm = 2 * m
        attention = 4 * m * m + 4 * m
        total = (self.vocab_size + self.learned_positions) * m + layer_norm
        total += self.num_layers * (attention + 2 * layer_norm)
        total += (self.num_layers - len(self.num_experts)) * ffn
        return total + sum(self.num_experts) * ffn + sum(self.gate_rows) * m

    @property
    def forward_flops_per_token(self) -> int:
        """Operations that predicting one token takes: each token passes through one expert per Switch layer.

        Attention is counted over all T positions, as the unmasked products of a sequence of T tokens.
        """
        m, f = self.model_dim, self.ffn_dim
        attention = 2 * 4 * m * m + 2 * 2 * self.tokens_per_sample * m
        ffn = 2 * 2 * m * f
        gates = 2 * m * sum(self.gate_rows)
        return self.num_layers * (attention + ffn) + gates + 2 * m * self.vocab_size

    @property
    def train_flops_per_token(self) -> int:
        """Operations of one token's forward and backward pass; recomputation and dropped tokens change nothing."""
        return 3 * self.forward_flops_per_token


@dataclass(frozen=True)
class TransformerLMShape:
    """Sizes of an ``alma_transformer_lm``.

    Attributes:
        model_dim: M.
        ffn_dim: F.
        num_layers: all layers, dense and Switch.
        num_heads: query heads.
        num_kv_heads: key-value heads.
        head_dim: dimension of a head.
        vocab_size: V, fairseq's four special symbols included.
        tokens_per_sample: T, length of a training or test sequence.
        gate_rows: R of each Switch layer; E for a flat gate.
        num_experts: E of each Switch layer.
        shares_embeddings: whether the output projection is the input embeddings.
    """

    model_dim: int
    ffn_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tokens_per_sample: int
    gate_rows: tuple[int, ...] = ()
    num_experts: tuple[int, ...] = ()
    shares_embeddings: bool = False

    @property
    def num_params(self) -> int:
        """Parameters, shared ones once."""
        m, num_ffns = self.model_dim, self.num_layers - len(self.num_experts) + sum(self.num_experts)
        layers = self.num_layers * (self._attention + 2 * m + 2 * self.head_dim)
        embeddings = (1 if self.shares_embeddings else 2) * self.vocab_size * m
        return embeddings + m + layers + num_ffns * 3 * m * self.ffn_dim + sum(self.gate_rows) * m

    @property
    def _attention(self) -> int:
        return self.model_dim * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def forward_flops_per_token(self) -> int:
        """Operations that predicting one token takes; as in `SwitchLMShape`."""
        m, scores = self.model_dim, 2 * 2 * self.tokens_per_sample * self.num_heads * self.head_dim
        layer = 2 * self._attention + scores + 2 * 3 * m * self.ffn_dim
        return self.num_layers * layer + 2 * m * sum(self.gate_rows) + 2 * m * self.vocab_size

    @property
    def train_flops_per_token(self) -> int:
        """Operations of one token's forward and backward pass; recomputation and dropped tokens change nothing."""
        return 3 * self.forward_flops_per_token


def bits_per_byte(loss: float, num_tokens: int, num_bytes: int) -> Optional[float]:
    """Convert a loss per token, which depends on the tokenizer, to one per byte of text, which does not.

    Args:
        loss: bits per token.
        num_tokens: tokens of the text that it is the mean over.
        num_bytes: length of that text in UTF-8.

    Returns:
        Bits per byte, or None for a text without bytes.
    """
    return loss * num_tokens / num_bytes if num_bytes else None
