"""The last pass: encode each piece, find what shares words with the held-out text, cut the rest anew, write the sets.

What a piece is encoded to does not depend on the deal, which so can wait until it is known what is left out of it.

Text repeats itself, so `DocumentEncoder` is several times faster than `StreamTokenizer` for the usual byte-level BPE:
GPT-2's rule cuts a text into pieces before any merge, so a chunk that begins and ends at such a cut has the same ids
wherever it stands, and these are looked up. The chunks are found with one regular expression that only cuts where the
rule is sure to cut; it need not find every cut. What it cannot judge (control characters, tokens added to the
vocabulary) goes to the tokenizer whole. A test compares both on odd text.
"""

import json
import re
from pathlib import Path
from typing import Generator, Iterator, Optional, Sequence

import numpy as np

from data_prep.text.buckets import COUNTED, KEYED, key_order_of, records_of, survey_of
from data_prep.text.deal import DROPPED, Cuts, cut, cuts_of, save_cuts, shares_of
from data_prep.text.passes import SingleStep, Step, Work
from data_prep.text.pool import Progress
from data_prep.text.training import HELD_OUT_NGRAMS, tokenizer_of
from fairseq_alma.data.ngrams import NgramHasher, NgramSet
from fairseq_alma.data.stream import TOKEN_SUFFIXES, Split, StreamFile, holdout_name, megabatch_name
from fairseq_alma.data.tokens import EOS, NUM_FAIRSEQ_SYMBOLS, StreamTokenizer, TokenFileWriter, id_dtype

# Each alternative starts at a cut, if the text before it ended at one, and ends at one:
_CHUNK = re.compile(
    # letters or digits up to ASCII that is neither (a letter beyond ASCII would go on with the word)
    r" ?(?:[A-Za-z]+(?=[!-@\[-`{-~ \n]|\Z)|[0-9]+(?=[!-/:-~ \n]|\Z))"
    # one line feed before the next line's first word
    r"|\n(?=\S)"
    # a contraction such as 's, with whatever letters follow: the rule takes "'s" off and leaves the rest
    r"|'[A-Za-z]+(?=[!-@\[-`{-~ \n]|\Z)"
    # punctuation up to a letter, a digit or a space, unless it begins a contraction
    r"| ?(?!'[A-Za-z])[!-/:-@\[-`{-~]+(?=[A-Za-z0-9 \n]|\Z)"
    # anything else: white space and all that follows, up to the next white space
    r"|\s*\S+|\s+\Z"
)
# White space to Python, but not to the rule.
_ODD = "\x1c\x1d\x1e\x1f"
_MAX_CACHED_LENGTH = 32


class DocumentEncoder:
    """Turn documents into the bytes of a token file.

    Args:
        tokenizer: what a document's tokens are.
        dtype: type of an id.
        cache_size: how many chunks are remembered at most (about 200 bytes each).
    """

    def __init__(self, tokenizer: StreamTokenizer, dtype: np.dtype, cache_size: int) -> None:
        self._tokenizer = tokenizer
        self.dtype = dtype
        self._eos = np.array([EOS], dtype=dtype).tobytes()
        self._cache: dict[str, bytes] = {}
        self._cache_size = cache_size
        self._whole_if = _needs_tokenizer(tokenizer.file) if tokenizer.kind == "tokenizers" else re.compile("")

    def encode(self, documents: Sequence[str]) -> list[bytes]:
        """Return the ids of each document with its eos, as bytes of ``dtype``."""
        if self._whole_if is None:
            return self._encode_by_chunks(documents)
        whole = [number for number, document in enumerate(documents) if self._whole_if.search(document)]
        encoded = dict(zip(whole, self._encode_whole([documents[number] for number in whole]), strict=True))
        others = [number for number in range(len(documents)) if number not in encoded]
        encoded |= zip(others, self._encode_by_chunks([documents[number] for number in others]), strict=True)
        return [encoded[number] for number in range(len(documents))]

    def _encode_whole(self, documents: Sequence[str]) -> list[bytes]:
        return [self._ids(tokens) + self._eos for tokens in self._tokenizer.encode_batch(documents)]

    def _encode_by_chunks(self, documents: Sequence[str]) -> list[bytes]:
        chunked = [_CHUNK.findall(document) for document in documents]
        missing = list(set().union(*chunked) - self._cache.keys())
        self._cache.update(zip(missing, map(self._ids, self._tokenizer.encode_batch(missing)), strict=True))
        ids_of = self._cache.__getitem__
        encoded = [b"".join(map(ids_of, chunks)) + self._eos for chunks in chunked]
        # Frequent chunks come early, so what comes after the cache is full is rarely worth an old chunk's place.
        keep = self._cache_size - (len(self._cache) - len(missing))
        for chunk in [chunk for chunk in missing if len(chunk) > _MAX_CACHED_LENGTH] if keep > 0 else missing:
            del self._cache[chunk]
        return encoded

    def _ids(self, tokens: list[int]) -> bytes:
        return (np.array(tokens, dtype=self.dtype) + self.dtype.type(NUM_FAIRSEQ_SYMBOLS)).tobytes()


def _needs_tokenizer(tokenizer_json: Path) -> Optional[re.Pattern]:
    """Return what a document contains that the tokenizer must see whole; the empty text is in every document."""
    content = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    if not _follows_the_rule(content):
        return re.compile("")
    added = [re.escape(token["content"]) for token in content.get("added_tokens") or []]
    return re.compile("|".join([f"[{_ODD}]", *added]))


def _follows_the_rule(content: dict) -> bool:
    """Tell whether a tokenizer.json is BPE on bytes, cut by GPT-2's rule and by nothing else."""
    model, pre_tokenizer = content["model"], content.get("pre_tokenizer") or {}
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and not content.get("normalizer")
        and pre_tokenizer.get("type") == "ByteLevel"
        and not pre_tokenizer.get("add_prefix_space", True)
        and pre_tokenizer.get("use_regex", True)
    )


ENCODED, TOKENS = "encoded.npz", "tokens.bin"
"""What is known of a piece's documents once they are encoded, and their ids."""
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
    leaves = ENCODED

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        folder, encoder = work.of_piece(number), work.once(encoder_of)
        records, marks = _marks(work, number)
        sizes, num_bytes, num_words = np.zeros((3, len(marks)), np.int32)
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
                num_words[first + chosen] = [len(documents[each].split()) for each in chosen]
                file.writelines(encoded)
                first += len(documents)
                yield bytes_read, 0
        shared = records[np.isin(records["row"], np.array([row for row, *_ in left_out], np.uint32))]
        words = dict(zip(shared["row"].tolist(), shared["words"].tolist(), strict=True))
        listed = [
            {"bytes": words[row], "begins": begins, "ngram": ngram} for row, begins, ngram in left_out[:MAX_LISTED]
        ]
        spelled = np.frombuffer(json.dumps(listed).encode(), np.uint8)
        folder.save(ENCODED, sizes=sizes, num_bytes=num_bytes, num_words=num_words, left_out=shared, listed=spelled)


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


class DealAgain(SingleStep):
    """Cut the mega-batches again, without what is left out."""

    leaves = _DEALT_AGAIN

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        """See `Step`. Raises AlmaError if what is left does not suffice."""
        left_out, cuts = work.once(left_out_of), work.once(cuts_of)
        if len(left_out):
            order = work.once(key_order_of).without(left_out)
            cuts = cut(order, shares_of(work), work.once(survey_of).groups, 0, cuts)
        save_cuts(work, _DEALT_AGAIN, cuts)
        yield 0, 0


def last_cuts_of(work: Work) -> Cuts:
    """Return how `DealAgain` has cut."""
    return Cuts(**json.loads(work.folder.read(_DEALT_AGAIN)))


def sets_of(work: Work, number: int) -> np.ndarray:
    """Return the set of each document of a piece, ``(documents,)``, int16."""
    records = records_of(work, number)
    records = records[~np.isin(records["row"], left_out_of_piece(work, number)["row"])]
    size = work.once(survey_of).piece_sizes[number]
    sets = np.full(size, DROPPED, np.int16)
    sets[records["row"]] = work.once(last_cuts_of).sets_of(records)
    return sets


_PLACED, _SIZES, _TOTALS, _HASHES = "placed.bin", "sizes.bin", "totals.npz", "hashes.bin"
_LAYOUT = "layout.json"
_AT_ONCE = 1 << 16  # documents
_COUNTS = ("documents", "words", "tokens", "bytes")


def names_of(work: Work) -> list[str]:
    """Return the names of the sets that a command makes, in the order of their numbers."""
    cuts = work.once(last_cuts_of)
    first = 0 if work.there is None else work.there.num_megabatches
    numbers = range(first, first + cuts.num_megabatches)
    held_out = ["valid", "test"] if cuts.held_out else []
    return [*map(megabatch_name, numbers), *held_out, *(map(holdout_name, numbers) if cuts.slices else ())]


class PlacePieces(Step):
    """Sort the tokens of a piece by the sets."""

    leaves = _TOTALS

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        folder, num_sets = work.of_piece(number), len(work.once(names_of))
        sets = sets_of(work, number)
        order = np.argsort(sets, kind="stable")
        order = order[np.searchsorted(sets[order], 0) :]  # without what is dropped
        last = np.searchsorted(sets[order], np.arange(num_sets), side="right")
        encoded = folder.load(ENCODED)
        sizes, width = encoded["sizes"].astype(np.int64), work.once(encoder_of).dtype.itemsize
        ends = np.cumsum(sizes) * width
        tokens = memoryview(folder.read(TOKENS))
        placed = np.append(0, np.cumsum(sizes[order]))[last]
        folder.save_slices(_PLACED, placed * width, *_sorted(tokens, ends - sizes * width, ends, order))
        folder.save_slices(_SIZES, last * 4, sizes[order].astype("<i4").tobytes())
        kept = records_of(work, number)["row"]
        hashes = folder.load(COUNTED, "hashes")["hashes"][kept]
        folder.write(_HASHES, hashes.tobytes())
        folder.save(
            _TOTALS,
            documents=np.diff(last, prepend=0),
            tokens=np.diff(placed, prepend=0),
            words=_total(sets, encoded["num_words"], num_sets),
            bytes=_total(sets, encoded["num_bytes"], num_sets),
        )
        folder.remove(TOKENS)
        yield 0, 0


def _sorted(tokens: memoryview, starts: np.ndarray, ends: np.ndarray, order: np.ndarray) -> Iterator[bytes]:
    for first in range(0, len(order), _AT_ONCE):
        some = order[first : first + _AT_ONCE]
        pairs = zip(starts[some].tolist(), ends[some].tolist(), strict=True)
        yield b"".join([tokens[start:end] for start, end in pairs])


def _total(sets: np.ndarray, weights: np.ndarray, num_sets: int) -> np.ndarray:
    kept = sets != DROPPED
    return np.bincount(sets[kept], weights[kept], minlength=num_sets).astype(np.int64)


def hashes_of(work: Work) -> np.ndarray:
    """Return eight bytes of each document that is not dropped, by which ``--append`` knows it, ascending."""
    parts = (work.of_piece(number).read(_HASHES) for number in range(len(work.pieces)))
    hashes = np.frombuffer(bytearray().join(parts), "<u8")
    hashes.sort()
    return hashes


class LayOutFiles(SingleStep):
    """Sum what is counted of each set."""

    leaves = _LAYOUT

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        totals = [work.of_piece(piece).load(_TOTALS) for piece in range(len(work.pieces))]
        counts = {each: np.sum([of_piece[each] for of_piece in totals], axis=0).tolist() for each in _COUNTS}
        work.folder.write(_LAYOUT, json.dumps(counts).encode())
        yield 0, 0


class WriteFiles(Step):
    """Write a token file of a set."""

    title = "writing"

    def num_tasks(self, work: Work) -> int:
        return len(work.once(names_of))

    def size(self, work: Work, number: int) -> int:
        return 1

    def is_done(self, work: Work, number: int) -> bool:
        """See `Step`: it is described, and there."""
        name = work.once(names_of)[number]
        return work.folder.exists(_described(number)) and all(work.out.exists(f"{name}{end}") for end in TOKEN_SUFFIXES)

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        names = work.once(names_of)
        vocab_size = work.once(tokenizer_of).vocab_size
        counts = np.zeros(vocab_size + NUM_FAIRSEQ_SYMBOLS, np.int64)
        counted = work.there is None and number == 0  # mega-batch 0: dict.txt tells how often each id occurs
        dtype = id_dtype(vocab_size)
        with work.out.writing(f"{names[number]}.bin") as tokens, work.out.writing(f"{names[number]}.idx") as index:
            writer = TokenFileWriter(tokens, index, dtype)
            for piece in range(len(work.pieces)):
                folder = work.of_piece(piece)
                sizes = np.frombuffer(folder.load_slice(_SIZES, number, len(names)), "<i4")
                ids = np.frombuffer(folder.load_slice(_PLACED, number, len(names)), dtype)
                writer.write(ids, sizes)
                if counted:
                    counts += np.bincount(ids, minlength=len(counts))
            digests = writer.close()
        entries = [
            {"path": f"{names[number]}{suffix}", "size": size, "sha256": digest}
            for suffix, (size, digest) in zip(TOKEN_SUFFIXES, digests, strict=True)
        ]
        content = {"files": entries, "counts": counts[NUM_FAIRSEQ_SYMBOLS:].tolist() if counted else []}
        work.folder.write(_described(number), json.dumps(content).encode())
        yield 1, 0


def _described(number: int) -> str:
    return f"file-{number:05d}.json"


def splits_of(work: Work) -> tuple[list[Split], np.ndarray]:
    """Return the sets with their files, and how often each token occurs in mega-batch 0 where a stream is made."""
    names = work.once(names_of)
    counts = json.loads(work.folder.read(_LAYOUT))
    id_counts = np.zeros(work.once(tokenizer_of).vocab_size, np.int64)
    splits = []
    for number, name in enumerate(names):
        described = json.loads(work.folder.read(_described(number)))
        files = tuple(StreamFile(**each) for each in described["files"])
        splits.append(Split(name, files, *(counts[each][number] for each in _COUNTS)))
        if described["counts"]:
            id_counts += described["counts"]
    return splits, id_counts
