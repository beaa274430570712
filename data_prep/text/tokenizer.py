"""Train the byte-level BPE tokenizer of a stream."""

import math
import os
from typing import Iterable


def vocab_size_for(num_bytes: int) -> int:
    """Return the power of two nearest to 1.6 * sqrt(bytes of mega-batch 0), but at least 512 and at most 32,768."""
    return int(min(32_768, max(512, 2 ** round(math.log2(1.6 * math.sqrt(max(1, num_bytes)))))))


def train_tokenizer(batches: Iterable[list[str]], vocab_size: int, num_threads: int = 1) -> bytes:
    """Train a tokenizer and return the content of its ``tokenizer.json``.

    Args:
        batches: lists of documents.
        vocab_size: requested vocabulary size. A small text can give a smaller vocabulary.
        num_threads: number of threads; does not change the result.
    """
    os.environ.setdefault("RAYON_NUM_THREADS", str(num_threads))
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if num_threads > 1 else "false"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(batches, trainer)
    return tokenizer.to_str(pretty=True).encode()
