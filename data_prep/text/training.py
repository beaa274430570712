"""The second pass: the tokenizer's sample and the n-grams of what is held out, and what is made of both.

The sample is of the first mega-batch, because a learner cannot see what has not arrived.
"""

import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Generator, Iterable, Iterator, Optional, Sequence

import numpy as np

from data_prep.text.deal import Deal
from data_prep.text.passes import PassProgress, PieceFunction, PieceTask
from data_prep.text.pool import Progress
from data_prep.text.survey import Survey
from fairseq_alma.data.ngrams import NgramHasher, distinct
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import open_atomically

CHOSEN, HELD_OUT = 1, 2
"""Marks of documents in this pass."""
_SAMPLE = "sample.json"


def choose_sample(survey: Survey, deal: Deal, max_words: int) -> np.ndarray:
    """Mark the first documents of mega-batch 0 in the random order, ``max_words`` words of them at most.

    Returns:
        ``(documents,)``, bool.
    """
    first = deal.order[deal.sets[deal.order] == 0]
    reached = np.cumsum(survey.words[first], dtype=np.int64)
    chosen = np.zeros(len(survey), dtype=bool)
    chosen[first[: max(1, int(np.searchsorted(reached, max_words, side="right")))]] = True
    return chosen


@dataclass(frozen=True)
class GatherPiece(PieceFunction):
    """Note the documents of a piece that are `CHOSEN` and the n-grams of those that are `HELD_OUT`.

    Attributes:
        ngram: words of an n-gram.
    """

    ngram: int
    result = "held-out.npy"

    def make(self, task: PieceTask) -> Generator[Progress, None, None]:
        """See `PieceFunction`."""
        chosen: list[str] = []
        hashes = [np.empty(0, np.uint64)]
        hasher = NgramHasher(self.ngram)
        for documents, marks, num_bytes in task.documents() if task.marks.any() else ():
            chosen += [documents[number] for number in np.flatnonzero(marks == CHOSEN)]
            hashes.append(hasher([documents[number] for number in np.flatnonzero(marks == HELD_OUT)]).hashes)
            yield num_bytes, 0
        with open_atomically(task.folder / _SAMPLE, "w") as file:
            json.dump(chosen, file)
        with open_atomically(task.folder / self.result) as file:
            np.save(file, distinct(hashes))


@dataclass(frozen=True)
class Training:
    """Train a tokenizer, and join the n-grams, of what `GatherPiece` has left.

    Attributes:
        folders: of all pieces.
        tokenizer: the tokenizer's file, to be made; None: there is one already.
        ngrams: the file of the n-grams, ascending, to be made; None: none are needed.
        kind: see `train_tokenizer`; so are the following.
        vocab_size: tokens wanted.
        num_threads: threads that train.
    """

    folders: Sequence[Path]
    tokenizer: Optional[Path]
    ngrams: Optional[Path]
    kind: str
    vocab_size: int
    num_threads: int

    def run(self) -> None:
        """Write both files, unless they are there."""
        if self.ngrams is not None and not self.ngrams.exists():
            hashes = distinct([np.load(folder / GatherPiece.result) for folder in self.folders])
            with open_atomically(self.ngrams) as file:
                np.save(file, hashes)
        if self.tokenizer is not None and not self.tokenizer.exists():
            total = sum((folder / _SAMPLE).stat().st_size for folder in self.folders)
            with PassProgress("training the tokenizer", total) as progress:
                content = train_tokenizer(self.kind, self._samples(progress), self.vocab_size, self.num_threads)
            with open_atomically(self.tokenizer) as file:
                file.write(content)

    def _samples(self, progress: PassProgress) -> Iterator[list[str]]:
        for folder in self.folders:
            content = (folder / _SAMPLE).read_bytes()
            documents = json.loads(content)
            yield documents
            progress.update((len(content), sum(len(document.split()) for document in documents)))


NUM_BYTES = 256  # byte-level BPE begins with one token per byte
# More text hardly changes the vocabulary, and what training needs in memory grows with the number of distinct words.
DEFAULT_WORDS = {"tokenizers": 30_000_000, "sentencepiece": 3_000_000}

_SENTENCE_BYTES = 1 << 16  # a longer line is cut: sentencepiece would leave it out
_SENTENCEPIECE_THREADS = 2  # fixed: its sums, and so its vocabulary, depend on this number


def train_tokenizer(kind: str, batches: Iterable[list[str]], vocab_size: int, num_threads: int) -> bytes:
    """Train a tokenizer.

    Args:
        kind: ``tokenizers`` (byte-level BPE) or ``sentencepiece`` (unigram with bytes for what is rare).
        batches: documents, a list at a time.
        vocab_size: vocabulary size wanted, in tokens; a small text may give fewer.
        num_threads: threads to use where the result does not depend on it.

    Returns:
        The content of the tokenizer's file.
    """
    if kind == "tokenizers":
        return _train_byte_level_bpe(batches, vocab_size, num_threads)
    return _train_sentencepiece(batches, vocab_size)


def _train_byte_level_bpe(batches: Iterable[list[str]], vocab_size: int, num_threads: int) -> bytes:
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
