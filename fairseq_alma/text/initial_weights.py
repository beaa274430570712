"""Initial weights of ``alma_transformer_lm`` with which small models learn faster: induction head and bigrams."""

from typing import Any, Optional

import torch
from torch import Tensor

from fairseq_alma.growth.tensors import init_uniform

MAX_TOKENS, MAX_RANK = 2**22, 128
"""Numbers of tokens and dimensions that are enough for `init_from_bigrams`; more only take more memory and time."""
SHARE, PSEUDOCOUNT, RIDGE = 0.9, 60.0, 0.01
"""Share of the embedding dimensions, constant c, and penalty of the ridge regression in `init_from_bigrams`."""
SAMPLE = (128, 128)
"""Maximum number of sequences, and maximum length, of the sample of text in `init_from_bigrams`."""


def rotation_angles(head_dim: int, theta: float, device: Optional[torch.device] = None) -> Tensor:
    """Return the (D / 2) angles per position by which rotary embeddings rotate the pairs of dimensions."""
    return theta ** -(torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)


@torch.no_grad()
def init_induction_head(decoder: Any) -> None:
    """Initialize the first head of the first two layers so that the model can learn early to copy earlier text.

    The head of the first layer attends to the previous token and adds its embedding to the residual stream. The head of
    the second layer attends to tokens whose previous token is the current token. Such induction heads (Olsson et al.
    2022, "In-context learning and induction heads") form late or never in small models that start from random weights.
    The idea is from Trockman and Kolter 2023, "Mimetic initialization of self-attention layers".
    """
    attention: list[Any] = [layer.self_attn for layer in decoder.layers[:2]]
    first, second = attention
    dim, pairs = decoder.head_dim, torch.arange(decoder.head_dim // 2)
    angles = rotation_angles(dim, decoder.rope_theta)
    # Positions are compared in the fastest pairs, embeddings in the slow pairs, where distance matters little.
    fast, slow = pairs < max(1, len(pairs) // 4), pairs >= len(pairs) // 3
    # The query at t equals the key at t - 1: an input dimension is constant, and the key is rotated by one position.
    table = decoder.embed_tokens.weight
    std = table.std()
    table[:, 0] = 2 * std
    for projection, angle in ((first.q_proj, 0 * angles), (first.k_proj, angles)):
        projection.weight[:dim] = 0
        projection.weight[:dim, 0] = torch.cat([fast * angle.cos(), fast * angle.sin()])
    read = first.v_proj.weight[:dim]
    write = torch.empty_like(read)
    init_uniform(write)
    first.o_proj.weight[:, :dim] = (1 if decoder.norms_embeddings else std) * write.t()
    second.q_proj.weight[:dim] = read * slow.repeat(2).unsqueeze(1)
    second.k_proj.weight[:dim] = write * slow.repeat(2).unsqueeze(1)
    # Norms limit the logits to sqrt(D) times the product of their weights, too little to attend to a single token.
    for each in attention:
        each.q_norm.weight[:], each.k_norm.weight[:] = 2**0.5, 2**0.5


@torch.no_grad()
def init_from_bigrams(decoder: Any, tokens: Tensor) -> None:
    """Initialize embeddings and output projection so that the model approximately predicts the bigrams of a text.

    Let N(a, b) be the number of occurrences of token b after token a, p(b) the frequency of b, and c a constant. The
    last 90 % of the embedding dimensions (at most 128) are left singular vectors of the matrix log(1 + N(a, b) / (c
    p(b))), which is similar to the pointwise mutual information (Levy and Goldberg 2014, "Neural word embedding as
    implicit matrix factorization"). The output projection is a ridge regression from the model's hidden states in a
    sample of the text to the logits log p(b | a).

    Args:
        decoder: new decoder, whose layers add almost nothing to the embeddings.
        tokens: (N,) int64, the training text.
    """
    table, vocab_size = decoder.embed_tokens.weight, decoder.embed_tokens.num_embeddings
    frequency = torch.bincount(tokens, minlength=vocab_size) + 0.5
    frequency /= frequency.sum()
    pairs, counts = torch.unique(tokens[:-1] * vocab_size + tokens[1:], return_counts=True)
    rows, columns = pairs // vocab_size, pairs % vocab_size
    values = torch.log1p(counts / (PSEUDOCOUNT * frequency[columns]))

    def matrix(values: Tensor) -> Tensor:
        shape = (vocab_size, vocab_size)
        return torch.sparse_coo_tensor(torch.stack([rows, columns]), values, shape, check_invariants=True).coalesce()

    weighted = matrix(values * (frequency[rows] * frequency[columns]).sqrt())
    left, scale, _ = torch.svd_lowrank(weighted, min(int(SHARE * table.size(1)), vocab_size, MAX_RANK))
    left *= scale.sqrt() / frequency.sqrt().unsqueeze(1)
    norms = left.norm(dim=1, keepdim=True)
    table[:, -left.size(1) :] = left.size(1) ** 0.5 * left / (norms + 0.1 * norms.square().mean().sqrt() + 1e-6)

    length = min(SAMPLE[1], len(tokens), decoder.max_positions())
    sample = tokens[: len(tokens) // length * length].view(-1, length)
    sample = sample[:: -(-len(sample) // SAMPLE[0])]
    decoder.eval()
    hidden = decoder(sample, features_only=True)[0].flatten(0, 1)
    decoder.train()
    gram = hidden.t() @ hidden + RIDGE * len(hidden) * torch.eye(hidden.size(1))
    sums = torch.zeros_like(table).index_add_(0, sample.flatten(), hidden)
    logits = matrix(values)
    moments = (
        logits.t() @ sums
        - (logits @ frequency) @ sums
        + torch.outer(frequency.log() - (frequency * frequency.log()).sum(), hidden.sum(0))
    )
    decoder.output_projection.weight[:] = torch.linalg.solve(gram.double(), moments.double().t()).t()
