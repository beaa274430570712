"""The first pass: what is known of each document without keeping it, and what follows for all of them."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Generator, Iterable, Sequence

import numpy as np

from data_prep.text.document import documents_of, groups_of
from data_prep.text.passes import SingleStep, Step, Work
from data_prep.text.pool import Progress
from fairseq_alma.data.ngrams import scrambled
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import MAX_MEGABATCHES

MAX_DOCUMENTS = 2**32 - 2
"""They are numbered in 32 bits."""
COUNTED = "counted.npz"
_SURVEY = "survey.json"
_SAMPLING = np.uint64(0x5851F42D4C957F2D)  # so that who is drawn says nothing about who goes where


class CountPieces(Step):
    """Note the hash, the number of words and the group, if there are any, of each document of a piece."""

    title = "counting words"

    def is_done(self, work: Work, number: int) -> bool:
        """See `Step`."""
        return work.of_piece(number).exists(COUNTED)

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        """See `Step`."""
        digests, words, groups = bytearray(), [np.empty(0, np.uint32)], []
        numbers: dict[str, int] = {}
        per_source = dict.fromkeys((part.source for part in work.pieces[number].parts), 0)
        for source, block, num_bytes in work.blocks(number):
            documents = documents_of(block)
            for document in documents:
                digests += hashlib.blake2b(document.encode(), digest_size=8).digest()
            counts = np.fromiter((len(document.split()) for document in documents), np.uint32, len(documents))
            words.append(counts)
            if block.group is not None:
                groups += [numbers.setdefault(name, len(numbers)) for name in groups_of(block)]
            per_source[source] += len(documents)
            yield num_bytes, int(counts.sum(dtype=np.int64))
        hashes = np.frombuffer(bytes(digests), "<u8")
        shares = np.array([source.share for source in per_source])
        sizes = np.array([*per_source.values()], np.int64)
        sampled = _sample(hashes, np.repeat(shares, sizes))
        work.of_piece(number).save(
            COUNTED,
            hashes=hashes,
            words=np.concatenate(words),
            groups=np.array(groups, np.int64),
            names=np.array([*numbers], "U"),
            per_source=sizes,
            sampled=sampled,
            num_sampled=np.array(sampled.sum()),
        )


@dataclass(frozen=True)
class Survey:
    """What is known of all documents together once they are counted.

    Attributes:
        piece_sizes: documents in each piece of the input.
        sampled_sizes: how many of them are among their inputs' shares.
        groups: names of the groups in the order of their numbers; none where documents are not put into groups.
    """

    piece_sizes: Sequence[int]
    sampled_sizes: Sequence[int]
    groups: Sequence[str] = ()

    @property
    def num_documents(self) -> int:
        """Documents that are among their inputs' shares."""
        return sum(self.sampled_sizes)


def survey_of(work: Work) -> Survey:
    """Return what `SurveyInput` found."""
    return Survey(**json.loads(work.folder.read(_SURVEY)))


class SurveyInput(SingleStep):
    """Join what was counted."""

    def is_done(self, work: Work, number: int) -> bool:
        """See `Step`."""
        return work.folder.exists(_SURVEY)

    def make(self, work: Work, number: int) -> Generator[Progress, None, None]:
        """See `Step`.

        Raises:
            AlmaError: an input holds no document at all, or there are too many documents or groups.
        """
        work.folder.write(_SURVEY, json.dumps(asdict(_survey(work))).encode())
        yield 0, 0


def _survey(work: Work) -> Survey:
    sizes, sampled_sizes = [], []
    groups: dict[str, int] = {}
    per_argument = dict.fromkeys((source.argument for source in work.sources), 0)
    for number, piece in enumerate(work.pieces):
        counted = work.of_piece(number).load(COUNTED, "per_source", "names", "num_sampled")
        of_piece = list(dict.fromkeys(part.source for part in piece.parts))
        for source, size in zip(of_piece, counted["per_source"].tolist(), strict=True):
            per_argument[source.argument] += size
        for name in counted["names"].tolist():
            groups.setdefault(name, len(groups))
        if len(groups) > MAX_MEGABATCHES:
            raise AlmaError(
                f"--by: {len(groups):,} values found up to {of_piece[-1].label}, at most {MAX_MEGABATCHES:,} "
                "mega-batches; choose a longer --period, or another field"
            )
        sizes.append(int(counted["per_source"].sum()))
        sampled_sizes.append(int(counted["num_sampled"]))
    if sum(sizes) > MAX_DOCUMENTS:
        raise AlmaError(f"INPUT: more than {MAX_DOCUMENTS:,} documents; join short ones, or make several streams")
    for source in work.sources:
        if not per_argument[source.argument]:
            raise AlmaError(f"{source.label}: empty, no document found in it; leave it out or give a file with text")
    if not sum(sampled_sizes):
        raise AlmaError(f"INPUT: none of {sum(sizes):,} documents is in a share so small; give larger ones")
    _refuse_known_groups(work, groups)
    return Survey(sizes, sampled_sizes, _in_order(groups))


def _refuse_known_groups(work: Work, groups: Iterable[str]) -> None:
    """Raise AlmaError if a value of ``--by`` is a mega-batch of the stream already."""
    known = [] if work.there is None else [group for entry in work.there.history for group in entry.get("groups", ())]
    again = sorted({*groups} & {*known})
    if again:
        raise AlmaError(
            f"--by {work.options.by}: {', '.join(again[:3])} came before and is mega-batch {known.index(again[0])} of "
            f"{work.options.out}; leave those documents out, or append them with --megabatches"
        )


def arguments_of(work: Work, number: int) -> np.ndarray:
    """Return the number of the argument that each document of a piece came with, or of its group: ``(documents,)``."""
    counted = work.of_piece(number).load(COUNTED, "per_source", "groups", "names")
    if work.options.by is None:
        of_source = [source.argument for source in dict.fromkeys(part.source for part in work.pieces[number].parts)]
        return np.repeat(np.array(of_source, np.uint16), counted["per_source"])
    place = {name: each for each, name in enumerate(work.once(survey_of).groups)}
    return np.array([place[name] for name in counted["names"].tolist()], np.uint16)[counted["groups"]]


def _sample(hashes: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Draw documents by their content: copies are drawn together, and a larger share holds a smaller one."""
    drawn = np.ones(len(hashes), bool)
    for share in np.unique(shares[shares < 1]).tolist():
        of_share = shares == share
        drawn[of_share] = scrambled(hashes[of_share] ^ _SAMPLING) < np.uint64(int(share * 2**64))
    return drawn


def _in_order(names: Iterable[str]) -> list[str]:
    """Sort the names of groups: whole numbers by their size, others by their characters, as dates are written."""
    names = list(names)
    if all(name.removeprefix("-").isascii() and name.removeprefix("-").isdigit() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)
