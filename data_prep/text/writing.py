"""The passes after the first: train the tokenizer on its sample, gather what is held out, write every set's token file.

The sample is of the first mega-batch, because a learner cannot see what has not arrived.
"""

import io
import os
from collections import deque
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Iterable, Iterator, Optional, Sequence

import numpy as np

from data_prep.text.deal import DROPPED, Deal
from data_prep.text.document import Block, documents_of
from data_prep.text.encoder import DocumentEncoder
from data_prep.text.pool import ordered_map
from data_prep.text.source import Source
from data_prep.text.survey import PassProgress, Survey
from fairseq_alma.data.manifest import Split, StreamFile
from fairseq_alma.data.ngrams import NgramHasher, NgramSet, distinct
from fairseq_alma.data.token_file import TokenFileWriter, id_dtype
from fairseq_alma.data.tokenizer import StreamTokenizer
from fairseq_alma.errors import AlmaError

_CACHED_CHUNKS = 600_000  # over all workers
_SHOWN = 80  # characters of a document that is left out


@dataclass(frozen=True)
class SecondPass:
    """Train a tokenizer on the documents that are chosen, and gather the n-grams of those that are held out.

    Attributes:
        sources: the input.
        words: ``(documents,)``, uint32: words of each document.
        block_sizes: documents in each block.
        chosen: ``(documents,)``, bool: to train on; none where there is a tokenizer.
        held_out: ``(documents,)``, bool: to take the n-grams of.
        ngram: words of an n-gram.
        kind: see `train_tokenizer`; so are the following.
        vocab_size: tokens wanted.
        num_workers: processes that read, and threads that train.
    """

    sources: Sequence[Source]
    words: np.ndarray
    block_sizes: np.ndarray
    chosen: np.ndarray
    held_out: np.ndarray
    ngram: int
    kind: str
    vocab_size: int
    num_workers: int

    def run(self) -> tuple[Optional[bytes], np.ndarray]:
        """Return the content of the tokenizer's file, if one was trained, and the n-grams, ascending."""
        hashes: list[np.ndarray] = []
        trains = bool(self.chosen.any())
        with PassProgress("training the tokenizer" if trains else "reading the held-out text") as progress:
            batches = self._batches(progress, hashes)
            content = None
            if trains:
                content = train_tokenizer(self.kind, batches, self.vocab_size, self.num_workers)
            else:
                deque(batches, maxlen=0)
        return content, distinct(hashes)

    def _batches(self, progress: PassProgress, hashes: list[np.ndarray]) -> Iterator[list[str]]:
        marks = self.chosen + 2 * self.held_out.astype(np.int8)
        total = int(self.words[marks > 0].sum(dtype=np.int64))
        done = 0
        tasks = _tasks(self.sources, self.words, self.block_sizes, marks)
        for words, documents, ngrams in ordered_map(_Choose(self.ngram), tasks, self.num_workers):
            yield documents
            hashes.append(ngrams)
            done += words
            progress.update(done / total, words)


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
class LeftOut:
    """A document that shares words with the validation or the test set.

    Attributes:
        number: of the document.
        num_words: white-space separated words.
        begins: its first characters.
        ngram: the first words of it that are held out.
    """

    number: int
    num_words: int
    begins: str
    ngram: str


def find_shared(
    sources: Sequence[Source], survey: Survey, looked_at: np.ndarray, size: int, hashes: Path, num_workers: int
) -> list[LeftOut]:
    """Return the documents that share n-grams with what is held out, in the order of reading.

    Args:
        sources: the input.
        survey: what the first pass found in it.
        looked_at: ``(documents,)``, bool: which documents to look at.
        size: words of an n-gram.
        hashes: the n-grams that are held out, a file of ascending uint64 that all workers map.
        num_workers: processes.
    """
    total = max(int(survey.words[looked_at].sum(dtype=np.int64)), 1)
    shared: list[LeftOut] = []
    with PassProgress("looking for held-out words") as progress:
        tasks = _tasks(sources, survey.words, survey.block_sizes, looked_at)
        first = done = 0
        for size_of_block, words, found in ordered_map(_FindShared(size, hashes), tasks, num_workers):
            shared += [replace(each, number=first + each.number) for each in found]
            first += size_of_block
            done += words
            progress.update(done / total, words)
    return shared


def write_sets(
    sources: Sequence[Source],
    survey: Survey,
    deal: Deal,
    names: Sequence[str],
    tokenizer: StreamTokenizer,
    root: Path,
    num_workers: int,
) -> list[Split]:
    """Encode every document and write it to the set that it was dealt to.

    Args:
        sources: the input.
        survey: what the first pass found in it.
        deal: the set of each document.
        names: the split's name of each set; its files are ``root/name.bin`` and ``.idx``.
        tokenizer: what encodes.
        root: the stream's folder.
        num_workers: processes.

    Returns:
        The splits, in the order of the names.
    """
    dtype = id_dtype(tokenizer.vocab_size)
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
    writers = [TokenFileWriter(root / name, dtype) for name in names]
    kept = deal.sets != DROPPED
    words = np.bincount(deal.sets[kept], survey.words[kept], minlength=len(names)).astype(np.int64)
    num_bytes = [0] * len(names)
    encode = _EncodeBlock(tokenizer.file, dtype, _CACHED_CHUNKS // num_workers)
    with PassProgress("encoding") as progress:
        done = 0
        for block_words, pieces in ordered_map(
            encode, _tasks(sources, survey.words, survey.block_sizes, deal.sets), num_workers
        ):
            for piece in pieces:
                writers[piece.set].append(piece.ids, piece.sizes)
                num_bytes[piece.set] += piece.num_bytes
            done += block_words
            progress.update(done / max(int(words.sum()), 1), block_words)
    splits = []
    for number, (name, writer) in enumerate(zip(names, writers, strict=True)):
        writer.close()
        files = tuple(StreamFile.describe(root, f"{name}{suffix}") for suffix in (".bin", ".idx"))
        splits.append(
            Split(name, files, writer.num_documents, int(words[number]), writer.num_tokens, num_bytes[number])
        )
    return splits


@dataclass(frozen=True)
class _Task:
    """A block and, per document of it, its number of words and its set (or whether it is chosen)."""

    block: Block
    words: np.ndarray
    sets: np.ndarray

    def documents(self) -> list[str]:
        documents = documents_of(self.block)
        if len(documents) != len(self.sets):
            raise _changed(self.block.label)
        return documents


@dataclass(frozen=True)
class _Piece:
    """The documents of one block that go to one set."""

    set: int
    ids: bytes
    sizes: np.ndarray
    num_bytes: int


def _tasks(sources: Sequence[Source], words: np.ndarray, block_sizes: np.ndarray, sets: np.ndarray) -> Iterator[_Task]:
    """Read the input again and put beside each block what is known of its documents."""
    start = block_number = 0
    for source in sources:
        for block, _ in source.blocks():
            if block_number == len(block_sizes):
                raise _changed(source.label)
            end = start + int(block_sizes[block_number])
            yield _Task(block, words[start:end], sets[start:end])
            start, block_number = end, block_number + 1
    if block_number != len(block_sizes):
        raise _changed(sources[-1].label)


def _changed(label: str) -> AlmaError:
    return AlmaError(f"{label}: changed while it was being read; give the command again when nothing writes to it")


@dataclass(frozen=True)
class _Choose:
    """Return the documents of a block to train the tokenizer on (mark 1) and the n-grams of those held out (mark 2)."""

    ngram: int

    def __call__(self, task: _Task) -> tuple[int, list[str], np.ndarray]:
        if not task.sets.any():
            return 0, [], np.empty(0, np.uint64)
        by_mark: dict[int, list[str]] = {0: [], 1: [], 2: []}
        for document, mark in zip(task.documents(), task.sets.tolist(), strict=True):
            by_mark[mark].append(document)
        hashes = np.unique(NgramHasher(self.ngram)(by_mark[2]).hashes)
        return int(task.words[task.sets > 0].sum(dtype=np.int64)), by_mark[1], hashes


@dataclass
class _FindShared:
    """Find documents of a block that share n-grams with what is held out, which is mapped in the process that does."""

    size: int
    hashes: Path

    @cached_property
    def _held_out(self) -> NgramSet:
        return NgramSet(np.load(self.hashes, mmap_mode="r"))

    def __call__(self, task: _Task) -> tuple[int, int, list[LeftOut]]:
        looked_at = np.flatnonzero(task.sets)
        documents = task.documents()
        hasher = NgramHasher(self.size)
        ngrams = hasher([documents[number] for number in looked_at.tolist()])
        found, _ = self._held_out.find(ngrams.hashes)
        owners, first = np.unique(ngrams.documents[found], return_index=True)
        shared = []
        for number, start in zip(looked_at[owners].tolist(), ngrams.starts[found[first]].tolist(), strict=True):
            text = documents[number]
            begins = " ".join(text[:_SHOWN].split())
            shared.append(LeftOut(number, int(task.words[number]), begins, hasher.spell(text, start)))
        return len(documents), int(task.words[looked_at].sum(dtype=np.int64)), shared


@dataclass
class _EncodeBlock:
    """Encode the kept documents of a block; the tokenizer is loaded in the process that does it."""

    tokenizer_file: Path
    dtype: np.dtype
    cache_size: int

    @cached_property
    def _encoder(self) -> DocumentEncoder:
        return DocumentEncoder(StreamTokenizer(self.tokenizer_file), self.dtype, self.cache_size)

    def __call__(self, task: _Task) -> tuple[int, list[_Piece]]:
        documents = task.documents()
        kept = np.flatnonzero(task.sets != DROPPED)
        encoded = self._encoder.encode([documents[number] for number in kept])
        pieces = []
        for set_number in np.unique(task.sets[kept]):
            members = np.flatnonzero(task.sets[kept] == set_number)
            ids = [encoded[member] for member in members]
            sizes = np.array([len(one) // self.dtype.itemsize for one in ids], dtype=np.int32)
            num_bytes = sum(len(documents[kept[member]].encode()) for member in members)
            pieces.append(_Piece(int(set_number), b"".join(ids), sizes, num_bytes))
        return int(task.words[kept].sum(dtype=np.int64)), pieces


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
