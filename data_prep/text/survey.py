"""The first pass: what is known of each document without keeping it, twelve bytes."""

import hashlib
from dataclasses import dataclass
from typing import Iterator, Sequence

import numpy as np

from data_prep.text.document import Block, documents_of
from data_prep.text.pool import ordered_map
from data_prep.text.progress import PassProgress
from data_prep.text.source import Source
from fairseq_alma.errors import AlmaError


@dataclass(frozen=True)
class Survey:
    """All documents of the input in the order of reading.

    Attributes:
        hashes: ``(documents,)``, uint64: 64 bits of BLAKE2b over the text, equal for equal texts.
        words: ``(documents,)``, uint32: white-space separated words.
        arguments: ``(documents,)``, uint16: number of the command's argument that the document came with.
        block_sizes: documents in each block, in the order of reading.
    """

    hashes: np.ndarray
    words: np.ndarray
    arguments: np.ndarray
    block_sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.hashes)


def survey_documents(sources: Sequence[Source], num_workers: int) -> Survey:
    """Read the whole input once and count it.

    Raises:
        AlmaError: an input is broken, no text, or holds no document at all.
    """
    hashes: list[np.ndarray] = []
    words: list[np.ndarray] = []
    arguments: list[np.ndarray] = []
    block_sizes: list[int] = []
    blocks = _BlockReader(sources)
    with PassProgress("counting words") as progress:
        for block_hashes, block_words in ordered_map(_examine, blocks, num_workers):
            block = len(block_sizes)
            hashes.append(block_hashes)
            words.append(block_words)
            block_sizes.append(len(block_hashes))
            argument = blocks.arguments[block]
            arguments.append(np.full(len(block_hashes), argument, dtype=np.uint16))
            progress.update(blocks.fractions[block], int(block_words.sum(dtype=np.int64)))
    documents_per_argument = dict.fromkeys((source.argument for source in sources), 0)
    for argument, size in zip(blocks.arguments, block_sizes, strict=True):
        documents_per_argument[argument] += size
    for source in sources:
        if not documents_per_argument[source.argument]:
            raise AlmaError(f"{source.label}: empty, no document found in it; leave it out or give a file with text")
    return Survey(
        np.concatenate(hashes), np.concatenate(words), np.concatenate(arguments), np.array(block_sizes, np.int64)
    )


class _BlockReader:
    """Iterate over all blocks, and remember where each came from."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self.arguments: list[int] = []
        self.fractions: list[float] = []

    def __iter__(self) -> Iterator[Block]:
        total = max(sum(source.size for source in self._sources), 1)
        done = 0
        for source in self._sources:
            for block, position in source.blocks():
                self.arguments.append(source.argument)
                self.fractions.append(min((done + position) / total, 1.0))
                yield block
            done += source.size


def _examine(block: Block) -> tuple[np.ndarray, np.ndarray]:
    """Return the hash and the number of words of each document of a block."""
    documents = documents_of(block)
    digests = b"".join(hashlib.blake2b(document.encode(), digest_size=8).digest() for document in documents)
    words = np.fromiter((len(document.split()) for document in documents), np.uint32, len(documents))
    return np.frombuffer(digests, dtype="<u8"), words
