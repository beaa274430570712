"""Number of parameters of an ``alma_transformer_lm``, and bits per byte."""

from typing import Optional, Sequence


def transformer_params(
    model_dim: int, ffn_dim: int, num_layers: int, heads: tuple[int, int, int], vocab_size: int,
    num_experts: Sequence[int] = (),
) -> int:  # fmt: skip
    """Return the number of parameters of an ``alma_transformer_lm`` with untied embeddings.

    Args:
        model_dim: M.
        ffn_dim: F.
        num_layers: number of dense and Switch layers.
        heads: query heads, key-value heads, and the dimension of a head.
        vocab_size: V, with fairseq's four symbols.
        num_experts: experts of each Switch layer, under a flat gate.
    """
    query_heads, kv_heads, head_dim = heads
    attention = model_dim * head_dim * 2 * (query_heads + kv_heads)
    layers = num_layers * (attention + 2 * model_dim + 2 * head_dim)
    num_ffns = num_layers - len(num_experts) + sum(num_experts)
    gates = sum(num_experts) * model_dim
    return 2 * vocab_size * model_dim + model_dim + layers + num_ffns * 3 * model_dim * ffn_dim + gates


def bits_per_byte(loss: float, num_tokens: int, num_bytes: int) -> Optional[float]:
    """Convert a mean loss in bits per token to bits per byte, which do not depend on the tokenizer.

    Args:
        loss: bits per token.
        num_tokens: tokens of the text.
        num_bytes: bytes of the text in UTF-8.

    Returns:
        Bits per byte; None for an empty text.
    """
    return loss * num_tokens / num_bytes if num_bytes else None
