"""Near-duplicates within the training text (``--near-duplicates minhash``): documents that share most of their words.

MinHash (Broder 1997) by datasketch, over 5 words in a row, without case, white space and punctuation. Two documents are
alike where a band of their hashes is equal; a chain of such pairs joins a group. Of a group the document with the
smallest key stays, whatever the order of the input; none, where one of them is held out or the stream has one already.
"""

from importlib.util import find_spec
from typing import Generator, Optional, Sequence

import numpy as np

from data_prep.text.buckets import KEYED, records_of, survey_of
from data_prep.text.deal import cuts_of
from data_prep.text.encoding import NEAR_COPIES, left_out_of_piece
from data_prep.text.passes import SingleStep, Step, Work
from data_prep.text.pool import Progress
from fairseq_alma.data.ngrams import NgramHasher, read_split, scrambled
from fairseq_alma.errors import AlmaError

_NGRAM, _PERMUTATIONS, _BANDS, _ROWS, _SCHEME = 5, 128, 9, 13, "affine32"
PARAMETERS = {
    "method": "minhash", "ngram": _NGRAM, "permutations": _PERMUTATIONS, "bands": _BANDS, "rows": _ROWS,
    "scheme": _SCHEME,
}  # fmt: skip
"""What decides what is alike; the bands are those that datasketch takes for 0.8 in common."""
_SIGNED = "signed.npz"


def require_library(method: Optional[str]) -> None:
    """Raise AlmaError if what finds near-duplicates is not installed."""
    if method is not None and not (find_spec("datasketch") and find_spec("scipy")):
        raise AlmaError(
            f"--near-duplicates {method}: datasketch is not installed; pip install 'fairseq-alma[near-duplicates]'"
        )


def bands_of(documents: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return which documents have words, and of each of these a number for each band, ``(documents, bands)``."""
    from datasketch import MinHash

    ngrams = NgramHasher(_NGRAM)(documents)
    empty = MinHash(num_perm=_PERMUTATIONS, seed=1, hashfunc=int, scheme=_SCHEME)
    owners, firsts = np.unique(ngrams.documents, return_index=True)
    signatures = np.empty((len(owners), _BANDS * _ROWS), np.uint64)
    for number, hashes in enumerate(np.split(ngrams.hashes >> np.uint64(32), firsts[1:])[: len(owners)]):
        made = empty.copy()
        made.update_batch(hashes.tolist())
        signatures[number] = made.hashvalues[: _BANDS * _ROWS]
    bands = np.tile(np.arange(_BANDS, dtype=np.uint64), (len(owners), 1))
    for row in range(_ROWS):
        bands = scrambled(bands ^ signatures[:, row::_ROWS])
    return owners, bands


class SignDocuments(Step):
    """Note the bands of the documents of a piece that are not left out yet, or of a set that the stream has already."""

    title = "looking for near-duplicates"
    leaves = _SIGNED

    def num_tasks(self, work: Work) -> int:
        return len(work.pieces) + len(_known(work)) if work.options.near_duplicates else 0

    def size(self, work: Work, number: int) -> int:
        here = number < len(work.pieces)
        return work.pieces[number].size if here else _known(work)[number - len(work.pieces)].num_bytes

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        records = np.empty(0, KEYED)
        chosen, bands = [np.empty(0, np.intp)], [np.empty((0, _BANDS), np.uint64)]
        if number < len(work.pieces):
            records = records_of(work, number)
            records = records[~np.isin(records["row"], left_out_of_piece(work, number)["row"])]
            records = records[np.argsort(records["row"])]
            marks = np.zeros(work.once(survey_of).piece_sizes[number], bool)
            marks[records["row"]] = True
            first = 0
            for documents, of_block, num_bytes in work.documents(number, marks):
                found, own = bands_of([documents[each] for each in np.flatnonzero(of_block)])
                chosen.append(first + found)
                bands.append(own)
                first += int(of_block.sum())
                yield num_bytes, 0
        else:
            assert work.there is not None
            split = _known(work)[number - len(work.pieces)]
            bands += [bands_of(documents)[1] for documents in read_split(work.there, split.name)]
            yield split.num_bytes, 0
        records = records[np.concatenate(chosen)]
        held_out = work.once(cuts_of).are_held_out(records)
        work.of_piece(number).save(_SIGNED, records=records, bands=np.concatenate(bands), held_out=held_out)


def _known(work: Work) -> Sequence:
    return () if work.there is None else work.there.splits


class FindNearCopies(SingleStep):
    """Join what is alike to groups, and note who is left out; one task."""

    takes_memory = True
    leaves = NEAR_COPIES

    def num_tasks(self, work: Work) -> int:
        return 1 if work.options.near_duplicates else 0

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        signed = [work.of_piece(each).load(_SIGNED) for each in range(len(work.pieces) + len(_known(work)))]
        records = np.concatenate([each["records"] for each in signed])
        ends = np.cumsum([len(each["records"]) for each in signed[: len(work.pieces)]])
        held_out = np.concatenate([each["held_out"] for each in signed])
        bands = np.concatenate([each["bands"] for each in signed])  # of what is there already behind those of records
        del signed
        pairs = [_equal_neighbours(bands[:, band]) for band in range(_BANDS)]
        here, there = (np.concatenate(each) for each in zip(*pairs, strict=True))
        graph = coo_array((np.ones(len(here), bool), (here, there)), (len(bands), len(bands)))
        _, groups = connected_components(graph, directed=False)
        stays = np.ones(len(bands), bool)
        stays[: len(records)] = held_out
        has_one = np.zeros(len(bands), bool)
        has_one[groups[stays]] = True
        order = np.lexsort((records["key"], groups[: len(records)]))
        of_group = groups[order]
        first = order[np.diff(of_group, prepend=-1) > 0]
        stays[first[~has_one[groups[first]]]] = True
        gone = np.flatnonzero(~stays)
        last = np.searchsorted(gone, ends) * KEYED.itemsize
        work.folder.save_slices(NEAR_COPIES, last, records[gone].tobytes())
        yield 0, 0


def _equal_neighbours(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of places that have the same number, enough to join all that have it."""
    order = np.argsort(numbers, kind="stable")
    equal = np.flatnonzero(numbers[order][1:] == numbers[order][:-1])
    return order[equal], order[equal + 1]
