"""How good, how large and how costly a learner was over a whole stream; parameters and operations of a language model.

Section 3.1 of the paper, equations 1 and 2 (CER, Mem, Comp), measures a learner over the stream, not only at its end.
While it waits, the model of its last update counts; before the first update, an untrained one.

Of operations a multiplication and an addition count as two; only matrix products count, as in
``torch.utils.flop_counter``. A backward pass costs two forward passes.

Letters: M model dim, F feed-forward dim, V vocabulary, T sequence length, E experts, R rows of a gate.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Mapping, Optional, Sequence


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


FARTHEST = 10.0  # factor up to which a line through known losses is followed beyond them


def in_force(values: Mapping[int, float], num_arrivals: int, untrained: float) -> list[float]:
    """Carry a figure of the updated models forward to every arrival.

    Args:
        values: arrival (0 to B-1) at which the model was updated -> figure of the updated model.
        num_arrivals: B.
        untrained: the figure of a model that was not trained yet.

    Returns:
        The figure after each of the B arrivals: for updates at 1 and 3 of 5, those of u, 1, 1, 3, 3.
    """
    carried = []
    current = untrained
    for arrival in range(num_arrivals):
        current = values.get(arrival, current)
        carried.append(current)
    return carried


def cumulative_error_rate(errors: Mapping[int, float], num_arrivals: int, num_classes: int) -> float:
    """Return CER, equation 1: the sum of the test error over all arrivals, in percent points.

    Args:
        errors: arrival of an update -> test error after it, 0 to 1.
        num_arrivals: B.
        num_classes: an untrained model is right once in that many cases.
    """
    return 100 * sum(in_force(errors, num_arrivals, untrained=1 - 1 / num_classes))


def cumulative_memory(num_params: Mapping[int, int], num_arrivals: int) -> float:
    """Return Mem, equation 2: the sum of the number of parameters over all arrivals.

    Args:
        num_params: arrival of an update -> parameters of the model after it.
        num_arrivals: B; before the first update the model has the size that the update finds.
    """
    if not num_params:
        return 0
    return sum(in_force(num_params, num_arrivals, untrained=num_params[min(num_params)]))


def cumulative_computation(train_flops: Mapping[int, float]) -> float:
    """Return Comp, equation 2: the training FLOPs over all arrivals; an arrival without an update costs none."""
    return sum(train_flops.values())


def average_perplexity(perplexities: Mapping[int, float], num_arrivals: int, vocab_size: int) -> float:
    """Return the mean test perplexity over all arrivals, the counterpart of CER for language.

    Args:
        perplexities: arrival of an update -> test perplexity after it.
        num_arrivals: B.
        vocab_size: perplexity of an untrained model, which finds every token equally likely.
    """
    return sum(in_force(perplexities, num_arrivals, untrained=vocab_size)) / num_arrivals


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


def updates_for_loss(points: Sequence[tuple[float, float]], loss: float) -> Optional[float]:
    """Return the updates that a loss takes, on lines in logarithms through what is known, and beyond on the nearest.

    Args:
        points: updates and the loss after them, at least two, in the order of the updates; losses above 0.
        loss: above 0.

    Returns:
        None where these points do not tell: the nearest line does not fall, or it reaches the loss only at more than
        `FARTHEST` times the most, or less than a `FARTHEST`-th of the fewest, updates that are known.
    """
    pairs = list(itertools.pairwise(points))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if loss >= pair[1][1]), pairs[-1])
    if y1 >= y0:
        return None
    found = math.log(x0) + math.log(loss / y0) / math.log(y1 / y0) * math.log(x1 / x0)
    if not math.log(points[0][0] / FARTHEST) <= found <= math.log(points[-1][0] * FARTHEST):
        return None
    return math.exp(found)


def mean_over_cost(values: Mapping[int, float], costs: Mapping[int, float]) -> Optional[float]:
    """Return the area under a figure against the cost so far, over the cost between the first update and the last.

    Args:
        values: arrival of an update -> figure after it; joined by straight lines.
        costs: arrival of an update -> what it cost, at least 0.

    Returns:
        None if nothing was spent after the first update.
    """
    spent = list(itertools.accumulate(costs[arrival] for arrival in sorted(values)))
    points = list(zip(spent, (values[arrival] for arrival in sorted(values)), strict=True))
    area = sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in itertools.pairwise(points))
    return area / (spent[-1] - spent[0]) if len(spent) > 1 and spent[-1] > spent[0] else None
