"""Train the tokenizer of a stream: byte-level BPE, or SentencePiece."""

import io
import math
import os
from typing import Iterable, Iterator

from fairseq_alma.errors import AlmaError

_SENTENCE_BYTES = 1 << 16  # a longer line is cut: sentencepiece would leave it out
_SENTENCEPIECE_THREADS = 2  # fixed: its sums, and so its vocabulary, depend on this number


def vocab_size_for(num_bytes: int) -> int:
    """Return the vocabulary size for a first mega-batch of so many bytes: near 1.6 times their root, a power of two."""
    return int(min(32_768, max(512, 2 ** round(math.log2(1.6 * math.sqrt(max(1, num_bytes)))))))


def train_tokenizer(kind: str, batches: Iterable[list[str]], vocab_size: int, num_threads: int) -> bytes:
    """Train a tokenizer and return the content of its file.

    Args:
        kind: ``tokenizers`` (byte-level BPE) or ``sentencepiece`` (unigram with bytes for what is rare).
        batches: documents, a list at a time.
        vocab_size: vocabulary size wanted, in tokens; a small text may give fewer.
        num_threads: threads to use where the result does not depend on it.
    """
    if kind == "sentencepiece":
        return _train_sentencepiece(batches, vocab_size)
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


def _train_sentencepiece(batches: Iterable[list[str]], vocab_size: int) -> bytes:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_sentences(batches),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            byte_fallback=True,
            # what is decoded must be what was encoded
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            max_sentence_length=_SENTENCE_BYTES,
            num_threads=_SENTENCEPIECE_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise AlmaError(
            f"--vocab-size {vocab_size}: sentencepiece cannot train on the first mega-batch ({error}); give another "
            "number, or a larger first mega-batch"
        ) from error
    return model.getvalue()


def _sentences(batches: Iterable[list[str]]) -> Iterator[str]:
    """Yield the lines of the documents, in pieces that sentencepiece takes."""
    longest = _SENTENCE_BYTES // 4  # characters; one takes four bytes at most
    for batch in batches:
        for document in batch:
            for line in document.split("\n"):
                yield from (line[start : start + longest] for start in range(0, len(line), longest))
