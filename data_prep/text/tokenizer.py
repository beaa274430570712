"""Train the byte-level BPE tokenizer of a stream, and encode documents.

With a cache, encoding is several times faster than with `StreamTokenizer`. The pre-tokenization rule of GPT-2 splits a
text into words before any merge. So a chunk that begins and ends at such a split always has the same token ids. The
cache stores the ids of chunks. A regular expression finds chunks, and splits only at places where the rule also splits.
The encoder does not split documents that contain added tokens or the control characters U+001C to U+001F. A test
compares the ids of unusual text with the ids of the tokenizer.
"""

import json
import math
import os
import re
from pathlib import Path
from typing import Iterable, Sequence

import numpy as np

from fairseq_alma.data.tokens import EOS, NUM_FAIRSEQ_SYMBOLS, StreamTokenizer

AUTO = 0
"""Value of ``--vocab-size auto``: the size of the first mega-batch determines the vocabulary size."""
# Each alternative starts and ends at a split of the rule, provided that the preceding text ended at a split:
_CHUNK = re.compile(
    # letters or digits before other ASCII characters (a letter outside ASCII would continue the word)
    r" ?(?:[A-Za-z]+(?=[!-@\[-`{-~ \n]|\Z)|[0-9]+(?=[!-/:-~ \n]|\Z))"
    # one line feed before the first word of the next line
    r"|\n(?=\S)"
    # a contraction such as 's and further letters: the rule cuts after "'s"
    r"|'[A-Za-z]+(?=[!-@\[-`{-~ \n]|\Z)"
    # punctuation up to a letter, a digit or a space, unless it begins a contraction
    r"| ?(?!'[A-Za-z])[!-/:-@\[-`{-~]+(?=[A-Za-z0-9 \n]|\Z)"
    # otherwise, all characters up to the next white space, including white space at the start
    r"|\s*\S+|\s+\Z"
)
# Characters that are white space for Python, but not for the rule.
_ODD = "\x1c\x1d\x1e\x1f"
_MAX_CACHED_LENGTH = 32


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


class DocumentEncoder:
    """Encode documents as bytes of a token file, and cache up to ``cache_size`` chunks (about 200 bytes each)."""

    def __init__(self, tokenizer: StreamTokenizer, dtype: np.dtype, cache_size: int) -> None:
        self._tokenizer = tokenizer
        self.dtype = dtype
        self._eos = np.array([EOS], dtype=dtype).tobytes()
        self._cache: dict[str, bytes] = {}
        self._cache_size = cache_size
        is_json = tokenizer.kind == "tokenizers"
        self._unsplit = _unsplit_documents(tokenizer.file) if is_json else re.compile("")

    def encode(self, documents: Sequence[str]) -> list[bytes]:
        """Return the token ids of each document, followed by the id of EOS, as the bytes of a ``dtype`` array."""
        unsplit = [number for number, document in enumerate(documents) if self._unsplit.search(document)]
        tokens = self._tokenizer.encode_batch([documents[number] for number in unsplit])
        encoded = {number: self._ids(each) + self._eos for number, each in zip(unsplit, tokens, strict=True)}
        others = [number for number in range(len(documents)) if number not in encoded]
        chunked = [_CHUNK.findall(documents[number]) for number in others]
        missing = list(set().union(*chunked) - self._cache.keys())
        self._cache.update(zip(missing, map(self._ids, self._tokenizer.encode_batch(missing)), strict=True))
        for number, chunks in zip(others, chunked, strict=True):
            encoded[number] = b"".join(map(self._cache.__getitem__, chunks)) + self._eos
        # Frequent chunks occur early, so a full cache keeps the old chunks and stores no new chunk.
        keep = self._cache_size - (len(self._cache) - len(missing))
        for chunk in [chunk for chunk in missing if len(chunk) > _MAX_CACHED_LENGTH] if keep > 0 else missing:
            del self._cache[chunk]
        return [encoded[number] for number in range(len(documents))]

    def _ids(self, tokens: list[int]) -> bytes:
        return (np.array(tokens, dtype=self.dtype) + self.dtype.type(NUM_FAIRSEQ_SYMBOLS)).tobytes()


def _unsplit_documents(tokenizer_json: Path) -> re.Pattern:
    """Return a regular expression that matches the documents that the encoder must not split."""
    content = json.loads(tokenizer_json.read_text(encoding="utf-8-sig"))
    model, pre_tokenizer = content["model"], content.get("pre_tokenizer") or {}
    is_bpe = model.get("type") == "BPE" and not model.get("dropout") and not content.get("normalizer")
    is_gpt2_rule = pre_tokenizer.get("type") == "ByteLevel" and pre_tokenizer.get("use_regex", True)
    if not is_bpe or not is_gpt2_rule or pre_tokenizer.get("add_prefix_space", True):
        return re.compile("")  # matches every document
    added = [re.escape(token["content"]) for token in content.get("added_tokens") or []]
    return re.compile("|".join([f"[{_ODD}]", *added]))
