"""Parameters and floating-point operations of a Switch language model, from its sizes alone.

A multiplication and an addition count as two operations; only matrix products count, as in
``torch.utils.flop_counter``. A backward pass costs two forward passes.

Letters: M model dim, F feed-forward dim, V vocabulary, T sequence length, E experts, R rows of a gate.
"""

from dataclasses import dataclass


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
