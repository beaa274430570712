"""Compute metrics: number of parameters of an ``alma_transformer_lm``, and loss in bits per byte."""

from typing import Optional, Sequence


def transformer_params(
    model_dim: int, ffn_dim: int, num_layers: int, heads: tuple[int, int, int], vocab_size: int,
    num_experts: Sequence[int] = (),
) -> int:  # fmt: skip
    """Return the number of parameters of an ``alma_transformer_lm`` with untied embeddings.

    Args:
        model_dim: embedding dimension.
        ffn_dim: hidden dimension of the feed-forward layers.
        num_layers: total number of dense layers and Switch layers.
        heads: (number of query heads, number of key-value heads, dimension of a head).
        vocab_size: vocabulary size, including the four special symbols of fairseq.
        num_experts: number of experts of each Switch layer with a flat gate (one linear layer).
    """
    query_heads, kv_heads, head_dim = heads
    attention = model_dim * head_dim * 2 * (query_heads + kv_heads)
    layers = num_layers * (attention + 2 * model_dim + 2 * head_dim)
    num_ffns = num_layers - len(num_experts) + sum(num_experts)
    gates = sum(num_experts) * model_dim
    return 2 * vocab_size * model_dim + model_dim + layers + num_ffns * 3 * model_dim * ffn_dim + gates


def bits_per_byte(loss: float, num_tokens: int, num_bytes: int) -> Optional[float]:
    """Convert a mean loss to bits per byte, a unit that does not depend on the tokenizer.

    Args:
        loss: mean loss in bits per token.
        num_tokens: number of tokens of the text.
        num_bytes: number of UTF-8 bytes of the text.

    Returns:
        Loss in bits per byte; None for an empty text.
    """
    return loss * num_tokens / num_bytes if num_bytes else None
