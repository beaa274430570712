"""The last pass and what follows it: encode each piece, then move its documents to the sets that they were dealt to.

What a piece is encoded to does not depend on the deal, which so can wait until it is known what shares words with the
held-out text. Where the documents of a piece belong in the files of a set follows from how many tokens the pieces
before it have there; so these are written in any order too.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generator, Iterator, Optional, Sequence

import numpy as np

from data_prep.text.deal import DROPPED, Deal
from data_prep.text.encoder import DocumentEncoder
from data_prep.text.passes import Passes, PieceFunction, PieceTask, load_arrays, save_arrays
from data_prep.text.pool import Progress
from data_prep.text.survey import Survey
from fairseq_alma.data.manifest import TOKEN_SUFFIXES, Split, StreamFile
from fairseq_alma.data.ngrams import NgramHasher, NgramSet
from fairseq_alma.data.token_file import TokenFileWriter
from fairseq_alma.data.tokenizer import StreamTokenizer
from fairseq_alma.files import open_atomically

ENCODED, LOOKED_AT = 1, 2
"""Marks of documents in this pass: those to encode, and of these, added, those to look for held-out n-grams in."""
MAX_LISTED = 1000
"""Documents that are left out and named in the manifest."""
CACHED_CHUNKS = 600_000
"""Of the encoders of all workers together."""
_SHOWN = 80  # characters of a document that is left out
_TOKENS, _LEFT_OUT = "tokens.bin", "left-out.json"


@dataclass(frozen=True)
class LeftOut:
    """The documents that share words with the validation or the test set.

    Attributes:
        documents: ``(documents,)``, bool.
        first: of the first of them the number, the first characters, and the first words that are held out.
    """

    documents: np.ndarray
    first: Sequence[tuple[int, str, str]]


@dataclass
class EncodePiece(PieceFunction):
    """Encode a piece, and find the documents that share n-grams with what is held out.

    Attributes:
        tokenizer_file: what encodes; it is loaded in the process that does.
        dtype: type of an id.
        cache_size: see `DocumentEncoder`.
        ngram: words of an n-gram.
        held_out: file of the n-grams that are held out, ascending, which all workers map; None: none are.
    """

    tokenizer_file: Path
    dtype: np.dtype
    cache_size: int
    ngram: int
    held_out: Optional[Path]
    result = "encoded.npz"

    @cached_property
    def _encoder(self) -> DocumentEncoder:
        return DocumentEncoder(StreamTokenizer(self.tokenizer_file), self.dtype, self.cache_size)

    @cached_property
    def _held_out(self) -> NgramSet:
        assert self.held_out is not None
        return NgramSet(np.load(self.held_out, mmap_mode="r"))

    def make(self, task: PieceTask) -> Generator[Progress, None, None]:
        """See `PieceFunction`."""
        sizes, num_bytes = np.zeros((2, len(task.marks)), np.int32)
        left_out: list[tuple[int, str, str]] = []
        first = 0
        with open_atomically(task.folder / _TOKENS) as file:
            for documents, marks, bytes_read in task.documents():
                if self.held_out is not None:
                    left_out += self._find_shared(documents, marks, first)
                chosen = np.flatnonzero(marks & ENCODED)
                encoded = self._encoder.encode([documents[number] for number in chosen])
                sizes[first + chosen] = [len(ids) // self.dtype.itemsize for ids in encoded]
                num_bytes[first + chosen] = [len(documents[number].encode()) for number in chosen]
                file.writelines(encoded)
                first += len(documents)
                yield bytes_read, 0
        with open_atomically(task.folder / _LEFT_OUT, "w") as file:
            json.dump(left_out[:MAX_LISTED], file)
        shared = np.array([number for number, *_ in left_out], np.int64)
        save_arrays(task.folder / self.result, sizes=sizes, num_bytes=num_bytes, shared=shared)

    def _find_shared(self, documents: Sequence[str], marks: np.ndarray, first: int) -> list[tuple[int, str, str]]:
        looked_at = np.flatnonzero(marks & LOOKED_AT)
        hasher = NgramHasher(self.ngram)
        ngrams = hasher([documents[number] for number in looked_at.tolist()])
        found, _ = self._held_out.find(ngrams.hashes)
        owners, places = np.unique(ngrams.documents[found], return_index=True)
        starts = ngrams.starts[found[places]].tolist()
        return [
            (first + number, " ".join(documents[number][:_SHOWN].split()), hasher.spell(documents[number], start))
            for number, start in zip(looked_at[owners].tolist(), starts, strict=True)
        ]


def encode(passes: Passes, survey: Survey, marks: np.ndarray, function: EncodePiece) -> LeftOut:
    """Encode the documents that are marked, and return what shares n-grams with what is held out."""
    shared = np.zeros(len(survey), bool)
    listed: list[tuple[int, str, str]] = []
    first = 0
    num_words = int(survey.words[marks > 0].sum(dtype=np.int64))
    folders = passes.run("encoding", function, survey.by_piece(marks), num_words)
    for folder, size in zip(folders, survey.piece_sizes.tolist(), strict=True):
        if function.held_out is not None:
            shared[first + load_arrays(folder / function.result)["shared"]] = True
            if len(listed) < MAX_LISTED:
                found = json.loads((folder / _LEFT_OUT).read_text(encoding="utf-8"))
                listed += [(first + number, begins, ngram) for number, begins, ngram in found]
        first += size
    return LeftOut(shared, listed[:MAX_LISTED])


@dataclass(frozen=True)
class _Move:
    """What of a piece goes where.

    Attributes:
        folder: of the piece.
        sets: ``(documents,)``: set of each document.
        first_documents: ``(sets,)``: documents of the pieces before it in each set.
        first_tokens: ``(sets,)``: their tokens.
    """

    folder: Path
    sets: np.ndarray
    first_documents: np.ndarray
    first_tokens: np.ndarray


@dataclass(frozen=True)
class _MovePiece:
    """Write the tokens of a piece to the files of the sets."""

    writers: Sequence[TokenFileWriter]

    def __call__(self, move: _Move) -> None:
        sizes = load_arrays(move.folder / EncodePiece.result)["sizes"].astype(np.int64)
        width = self.writers[0].dtype.itemsize
        ends = np.cumsum(sizes) * width
        starts = ends - sizes * width
        tokens = memoryview((move.folder / _TOKENS).read_bytes())
        for number in np.unique(move.sets[move.sets != DROPPED]).tolist():
            members = np.flatnonzero(move.sets == number)
            ids = b"".join(
                tokens[start:end] for start, end in zip(starts[members].tolist(), ends[members].tolist(), strict=True)
            )
            place = int(move.first_documents[number]), int(move.first_tokens[number])
            self.writers[number].write(ids, sizes[members], *place)


def write_sets(
    passes: Passes, survey: Survey, deal: Deal, names: Sequence[str], root: Path, dtype: np.dtype
) -> list[Split]:
    """Write every set of what was encoded.

    Args:
        passes: the input, encoded.
        survey: its documents.
        deal: the set of each of them.
        names: the split's name of each set; its files are ``root/name.bin`` and ``.idx``.
        root: the stream's folder.
        dtype: type of an id.

    Returns:
        The splits, in the order of the names.
    """
    sets = survey.by_piece(deal.sets)
    num_documents, num_tokens = np.zeros((2, len(passes.pieces), len(names)), np.int64)
    num_words, num_bytes = np.zeros((2, len(names)), np.int64)
    for number, (folder, of_piece, words) in enumerate(
        zip(passes.folders, sets, survey.by_piece(survey.words), strict=True)
    ):
        encoded = load_arrays(folder / EncodePiece.result)
        kept = of_piece != DROPPED

        def total(weights: np.ndarray, of_piece: np.ndarray = of_piece, kept: np.ndarray = kept) -> np.ndarray:
            return np.bincount(of_piece[kept], weights[kept], minlength=len(names)).astype(np.int64)

        num_documents[number] = total(np.ones(len(of_piece)))
        num_tokens[number] = total(encoded["sizes"])
        num_words += total(words)
        num_bytes += total(encoded["num_bytes"])
    documents, tokens = num_documents.sum(axis=0), num_tokens.sum(axis=0)
    writers = [
        TokenFileWriter(root / name, dtype, *sizes)
        for name, *sizes in zip(names, documents.tolist(), tokens.tolist(), strict=True)
    ]
    for writer in writers:
        writer.create()
    for _ in passes.workers.map(_MovePiece(writers), _moves(passes.folders, sets, num_documents, num_tokens)):
        pass
    files = [*passes.workers.map(_Describe(root), names)]
    counts = zip(*(each.tolist() for each in (documents, num_words, tokens, num_bytes)), strict=True)
    return [Split(name, of_set, *counted) for name, of_set, counted in zip(names, files, counts, strict=True)]


def _moves(
    folders: Sequence[Path], sets: Sequence[np.ndarray], num_documents: np.ndarray, num_tokens: np.ndarray
) -> Iterator[_Move]:
    documents, tokens = np.zeros((2, num_documents.shape[1]), np.int64)
    for number, folder in enumerate(folders):
        yield _Move(folder, sets[number], documents.copy(), tokens.copy())
        documents += num_documents[number]
        tokens += num_tokens[number]


@dataclass(frozen=True)
class _Describe:
    root: Path

    def __call__(self, name: str) -> tuple[StreamFile, ...]:
        return tuple(StreamFile.describe(self.root, f"{name}{suffix}") for suffix in TOKEN_SUFFIXES)
