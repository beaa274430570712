"""The last pass: encode each piece, find what shares words with the held-out text, and cut the rest anew.

What a piece is encoded to does not depend on the deal, which so can wait until it is known what is left out of it.
"""

import json
from typing import Generator, Sequence

import numpy as np

from data_prep.text.buckets import KEYED, key_order_of, records_of
from data_prep.text.deal import DROPPED, Cuts, cut, cuts_of, save_cuts, shares_of
from data_prep.text.encoder import DocumentEncoder
from data_prep.text.passes import SingleStep, Step, Work
from data_prep.text.pool import Progress
from data_prep.text.survey import survey_of
from data_prep.text.training import HELD_OUT_NGRAMS, tokenizer_of
from fairseq_alma.data.ngrams import NgramHasher, NgramSet
from fairseq_alma.data.token_file import id_dtype

ENCODED, TOKENS = "encoded.npz", "tokens.bin"
"""What is known of a piece's documents once they are encoded, and their ids."""
NEAR_COPIES = "near-copies.bin"
"""The documents of each piece that are near-duplicates of others; see `near_copies`."""
MAX_LISTED = 1000
"""Documents that are left out and named in the manifest."""
_CACHED_CHUNKS = 600_000  # of the encoders of all workers together
_SHOWN = 80  # characters of a document that is left out
_DEALT_AGAIN = "dealt-again.json"
_ENCODED, _LOOKED_AT = 1, 2


def encoder_of(work: Work) -> DocumentEncoder:
    """Return what encodes documents."""
    tokenizer = work.once(tokenizer_of)
    return DocumentEncoder(tokenizer, id_dtype(tokenizer.vocab_size), _CACHED_CHUNKS // work.num_workers)


def _held_out_of(work: Work) -> NgramSet:
    return NgramSet(np.load(work.folder.here(HELD_OUT_NGRAMS), mmap_mode="r"))  # which all workers share


class EncodePieces(Step):
    """Encode a piece, and find the documents that share n-grams with what is held out."""

    title = "encoding"

    def num_words(self, work: Work) -> int:
        """See `Step`."""
        return work.once(cuts_of).total

    def is_done(self, work: Work, number: int) -> bool:
        """See `Step`."""
        return work.of_piece(number).exists(ENCODED)

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        """See `Step`."""
        folder, encoder = work.of_piece(number), work.once(encoder_of)
        records, marks = _marks(work, number)
        sizes, num_bytes = np.zeros((2, len(marks)), np.int32)
        left_out: list[tuple[int, str, str]] = []
        first = 0
        with folder.writing(TOKENS) as file:
            for documents, of_block, bytes_read in work.documents(number, marks):
                if work.options.ngram is not None:
                    left_out += _find_shared(work, documents, of_block, first)
                chosen = np.flatnonzero(of_block & _ENCODED)
                encoded = encoder.encode([documents[each] for each in chosen])
                sizes[first + chosen] = [len(ids) // encoder.dtype.itemsize for ids in encoded]
                num_bytes[first + chosen] = [len(documents[each].encode()) for each in chosen]
                file.writelines(encoded)
                first += len(documents)
                yield bytes_read, 0
        shared = records[np.isin(records["row"], np.array([row for row, *_ in left_out], np.uint32))]
        words = dict(zip(shared["row"].tolist(), shared["words"].tolist(), strict=True))
        listed = [
            {"words": words[row], "begins": begins, "ngram": ngram} for row, begins, ngram in left_out[:MAX_LISTED]
        ]
        spelled = np.frombuffer(json.dumps(listed).encode(), np.uint8)
        folder.save(ENCODED, sizes=sizes, num_bytes=num_bytes, left_out=shared, listed=spelled)


def _marks(work: Work, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what is known of the documents of a piece that are not dropped, and what to do with each of all."""
    records, cuts = records_of(work, number), work.once(cuts_of)
    marks = np.zeros(work.once(survey_of).piece_sizes[number], np.uint8)
    marks[records["row"]] = _ENCODED
    marks[records["row"][~cuts.are_held_out(records)]] |= _LOOKED_AT
    return records, marks


def _find_shared(work: Work, documents: Sequence[str], marks: np.ndarray, first: int) -> list[tuple[int, str, str]]:
    """Return the number, the first characters and the n-gram of each document that shares one."""
    looked_at = np.flatnonzero(marks & _LOOKED_AT)
    hasher = NgramHasher(work.options.decontaminate_ngram)
    ngrams = hasher([documents[number] for number in looked_at.tolist()])
    found, _ = work.once(_held_out_of).find(ngrams.hashes)
    owners, places = np.unique(ngrams.documents[found], return_index=True)
    starts = ngrams.starts[found[places]].tolist()
    return [
        (first + number, " ".join(documents[number][:_SHOWN].split()), hasher.spell(documents[number], start))
        for number, start in zip(looked_at[owners].tolist(), starts, strict=True)
    ]


def left_out_of(work: Work) -> np.ndarray:
    """Return the documents that share words with the validation or the test set, `KEYED`."""
    parts = [left_out_of_piece(work, number) for number in range(len(work.pieces))]
    return np.concatenate([np.empty(0, KEYED), *parts])


def left_out_of_piece(work: Work, number: int) -> np.ndarray:
    """Return those of a piece."""
    return work.of_piece(number).load(ENCODED, "left_out")["left_out"]


def listed_of(work: Work) -> list[dict]:
    """Return how the first of the documents that are left out begin, and what they share."""
    listed: list[dict] = []
    for number in range(len(work.pieces)):
        if len(listed) < MAX_LISTED and len(left_out_of_piece(work, number)):
            listed += json.loads(work.of_piece(number).load(ENCODED, "listed")["listed"].tobytes())
    return listed[:MAX_LISTED]


def near_copies_of(work: Work) -> np.ndarray:
    """Return the documents that are left out as others are nearly equal, `KEYED`; none unless that is asked for."""
    parts = [_near_copies_of_piece(work, number) for number in range(len(work.pieces))]
    return np.concatenate([np.empty(0, KEYED), *parts])


def _near_copies_of_piece(work: Work, number: int) -> np.ndarray:
    if work.options.near_duplicates is None:
        return np.empty(0, KEYED)
    return np.frombuffer(work.folder.load_slice(NEAR_COPIES, number, len(work.pieces)), KEYED)


class DealAgain(SingleStep):
    """Cut the mega-batches again, without what is left out."""

    def is_done(self, work: Work, number: int) -> bool:
        """See `Step`."""
        return work.folder.exists(_DEALT_AGAIN)

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        """See `Step`. Raises AlmaError if what is left does not suffice."""
        left_out, cuts = np.concatenate([work.once(left_out_of), near_copies_of(work)]), work.once(cuts_of)
        if len(left_out):
            order = work.once(key_order_of).without(left_out)
            cuts = cut(order, shares_of(work), work.once(survey_of).groups, 0, cuts)
        save_cuts(work, _DEALT_AGAIN, cuts)
        yield 0, 0


def last_cuts_of(work: Work) -> Cuts:
    """Return how `DealAgain` has cut."""
    return Cuts(**json.loads(work.folder.read(_DEALT_AGAIN)))


def sets_of(work: Work, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the set of each document of a piece, ``(documents,)``, int16, and its words, 0 where it is in none."""
    records = records_of(work, number)
    for left_out in (left_out_of_piece(work, number), _near_copies_of_piece(work, number)):
        records = records[~np.isin(records["row"], left_out["row"])]
    size = work.once(survey_of).piece_sizes[number]
    sets, words = np.full(size, DROPPED, np.int16), np.zeros(size, np.int64)
    sets[records["row"]] = work.once(last_cuts_of).sets_of(records)
    words[records["row"]] = records["words"]
    return sets, words
