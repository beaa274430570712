"""The first pass: what is known of each document without keeping it, twelve bytes."""

import hashlib
import sys
import time
from dataclasses import dataclass
from typing import Iterable, Iterator, Optional, Sequence

import numpy as np

from data_prep.text.document import Block, documents_of, groups_of
from data_prep.text.pool import ordered_map
from data_prep.text.source import Source
from fairseq_alma.data.ngrams import scrambled
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import MAX_MEGABATCHES
from fairseq_alma.terminal import LiveLine, spell_duration, tell

MAX_DOCUMENTS = 2**32 - 2
"""They are numbered in 32 bits."""
_SAMPLING = np.uint64(0x5851F42D4C957F2D)  # so that who is drawn says nothing about who goes where


@dataclass(frozen=True)
class Survey:
    """All documents of the input in the order of reading.

    Attributes:
        hashes: ``(documents,)``, uint64: 64 bits of BLAKE2b over the text, equal for equal texts.
        words: ``(documents,)``, uint32: white-space separated words.
        arguments: ``(documents,)``, uint16: number of the command's argument that the document came with, or of its
            group.
        block_sizes: documents in each block, in the order of reading.
        groups: their names in the order of their numbers; none where documents are not put into groups.
        sampled: ``(documents,)``, bool: whether the document is among its input's share; None: all are.
    """

    hashes: np.ndarray
    words: np.ndarray
    arguments: np.ndarray
    block_sizes: np.ndarray
    groups: tuple[str, ...] = ()
    sampled: Optional[np.ndarray] = None

    def __len__(self) -> int:
        return len(self.hashes)


def survey_documents(sources: Sequence[Source], num_workers: int) -> Survey:
    """Read the whole input once and count it.

    Raises:
        AlmaError: an input is broken, no text, or holds no document at all; or there are too many documents or groups.
    """
    hashes: list[np.ndarray] = []
    words: list[np.ndarray] = []
    arguments: list[np.ndarray] = []
    block_sizes: list[int] = []
    groups: dict[str, int] = {}
    sampled: list[np.ndarray] = []
    num_documents = 0
    blocks = _BlockReader(sources)
    with PassProgress("counting words") as progress:
        for block_hashes, block_words, block_groups in ordered_map(_examine, blocks, num_workers):
            block = len(block_sizes)
            hashes.append(block_hashes)
            words.append(block_words)
            block_sizes.append(len(block_hashes))
            source = blocks.sources[block]
            sampled.append(_sample(block_hashes, source.share))
            if block_groups is None:
                arguments.append(np.full(len(block_hashes), source.argument, dtype=np.uint16))
            else:
                numbers = [groups.setdefault(group, len(groups)) for group in block_groups]
                if len(groups) > MAX_MEGABATCHES:
                    raise AlmaError(
                        f"--by: {len(groups):,} values found up to {source.label}, at most {MAX_MEGABATCHES:,} "
                        "mega-batches; choose a longer --period, or another field"
                    )
                arguments.append(np.array(numbers, dtype=np.uint16))
            num_documents += len(block_hashes)
            if num_documents > MAX_DOCUMENTS:
                raise AlmaError(
                    f"INPUT: more than {MAX_DOCUMENTS:,} documents; join short ones, or make several streams"
                )
            progress.update(blocks.fractions[block], int(block_words.sum(dtype=np.int64)))
    documents_per_argument = dict.fromkeys((source.argument for source in sources), 0)
    for source, size in zip(blocks.sources, block_sizes, strict=True):
        documents_per_argument[source.argument] += size
    for source in sources:
        if not documents_per_argument[source.argument]:
            raise AlmaError(f"{source.label}: empty, no document found in it; leave it out or give a file with text")
    names = _in_order(groups)
    numbers_of = np.concatenate(arguments)
    if names:
        place = {name: number for number, name in enumerate(names)}
        numbers_of = np.array([place[name] for name in groups], dtype=np.uint16)[numbers_of]
    return Survey(
        np.concatenate(hashes),
        np.concatenate(words),
        numbers_of,
        np.array(block_sizes, np.int64),
        tuple(names),
        np.concatenate(sampled) if any(source.share < 1 for source in sources) else None,
    )


def _sample(hashes: np.ndarray, share: float) -> np.ndarray:
    """Draw documents by their content: copies are drawn together, and a larger share holds a smaller one."""
    if share == 1:
        return np.ones(len(hashes), bool)
    return scrambled(hashes ^ _SAMPLING) < np.uint64(int(share * 2**64))


def _in_order(names: Iterable[str]) -> list[str]:
    """Sort the names of groups: whole numbers by their size, others by their characters, as dates are written."""
    names = list(names)
    if all(name.removeprefix("-").isascii() and name.removeprefix("-").isdigit() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


class _BlockReader:
    """Iterate over all blocks, and remember where each came from."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self.sources: list[Source] = []
        self.fractions: list[float] = []

    def __iter__(self) -> Iterator[Block]:
        total = max(sum(source.size for source in self._sources), 1)
        done = 0
        for source in self._sources:
            for block, position in source.blocks():
                self.sources.append(source)
                self.fractions.append(min((done + position) / total, 1.0))
                yield block
            done += source.size


def _examine(block: Block) -> tuple[np.ndarray, np.ndarray, Optional[list[str]]]:
    """Return the hash, the number of words and the group, if there are any, of each document of a block."""
    documents = documents_of(block)
    groups = None if block.group is None else groups_of(block)
    digests = b"".join(hashlib.blake2b(document.encode(), digest_size=8).digest() for document in documents)
    words = np.fromiter((len(document.split()) for document in documents), np.uint32, len(documents))
    return np.frombuffer(digests, dtype="<u8"), words, groups


class PassProgress:
    """Words per second and time left of one pass.

    Args:
        title: what the pass does.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._start = time.monotonic()
        self._words = 0
        self._line = LiveLine()
        self._line.is_due()  # nothing is known yet

    def __enter__(self) -> "PassProgress":
        return self

    def __exit__(self, kind: Optional[type], *exception: object) -> None:
        self._line.clear()
        if kind is None:
            tell(f"{self._title}: {self._pace()}, {self._seconds():.1f} s", sys.stderr)

    def update(self, fraction: float, words: int) -> None:
        """Report that ``words`` words more are done, and which fraction of the pass (0 to 1) by now."""
        self._words += words
        if self._line.is_due():
            left = spell_duration(self._seconds() / max(fraction, 1e-9) * (1 - fraction))
            done = f"{self._title}: {100 * fraction:.0f} %"
            shorter = f"{done}, {left} left"
            self._line.show(f"{done}, {self._pace()}, {left} left", fraction, 1.0, [shorter])

    def _seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    def _pace(self) -> str:
        return f"{self._words:,} words, {self._words / self._seconds():,.0f} words/s"
