"""What the manifest of a stream is made of: files, splits, the entries of the tokenizer and of the images.

The manifest names every file with its size and sha256, so that whoever trains on a stream can tell that it is whole.
The types below are also what `stream.Stream.open` holds a manifest against: types, ranges, and paths within the folder.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Iterable, Mapping, Union

from msgspec import Meta, Struct

from fairseq_alma.data.known_files import VERIFIED
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import Amount, Count, Name, Positive, Sha256

MANIFEST = "stream.json"
IMAGES = "images.npy"
LABELS = "labels.npy"
TOKEN_SUFFIXES = (".bin", ".idx")
INDEX_SUFFIXES = (".npy",)

Side = Annotated[int, Meta(ge=1, le=1 << 20)]


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's content in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class StreamFile:
    """One file of a stream: path within the stream's folder, size in bytes, sha256 of the content."""

    path: Name
    size: Count
    sha256: Sha256

    def __post_init__(self) -> None:
        path = PurePosixPath(self.path)
        if not path.name or path.is_absolute() or ".." in path.parts or str(path) != self.path or "\0" in self.path:
            raise ValueError(f"path {self.path!r} found, one within the stream's folder is needed")

    @classmethod
    def describe(cls, root: Path, path: str) -> "StreamFile":
        """Measure the file ``root/path``."""
        return cls(path, (root / path).stat().st_size, file_sha256(root / path))

    def verify(self, root: Path) -> None:
        """Raise AlmaError unless the file under ``root`` has this size and this content, which is read once."""
        path = root / self.path
        remedy = "prepare the stream again, or copy this file again from where it is whole"
        if not path.is_file():
            raise AlmaError(f"{path}: no such file, but {MANIFEST} lists it with {self.size} bytes; {remedy}")
        size = path.stat().st_size
        if size != self.size:
            raise AlmaError(f"{path}: {size} bytes found, {MANIFEST} says {self.size}; {remedy}")
        if VERIFIED.has(path, self.sha256):
            return
        sha256 = file_sha256(path)
        if sha256 != self.sha256:
            raise AlmaError(f"{path}: sha256 {sha256} found, {MANIFEST} says {self.sha256}; {remedy}")
        VERIFIED.add(path, self.sha256)


@dataclass(frozen=True)
class Split:
    """One part of a stream: a mega-batch, the validation set or the test set.

    Attributes:
        name: ``megabatch-000/train``, ``valid`` or ``test``, and ``megabatch-000/valid`` in a stream of images; the
            files are ``name`` plus ``.bin`` and ``.idx`` for text, ``.npy`` for images; of shards
            ``megabatch-000/train-00000`` and so on.
        files: what the split consists of, shards in the order in which they are joined.
        num_documents: sequences in the token file, each ending with eos.
        num_words: white-space separated words of the text.
        num_tokens: ids in the token file, one eos per document included.
        num_bytes: UTF-8 bytes of the documents' text: what bits per byte are counted over.
        num_images: images, in a stream of images.
    """

    name: Name
    files: tuple[StreamFile, ...]
    num_documents: Count = 0
    num_words: Count = 0
    num_tokens: Count = 0
    num_bytes: Count = 0
    num_images: Count = 0


@dataclass(frozen=True)
class TokenizerEntry:
    """What the manifest says of a text stream's tokenizer.

    Attributes:
        kind: ``tokenizers`` (a ``tokenizer.json``) or ``sentencepiece`` (a ``.model``).
        vocab_size: number of tokens, that is lines of ``dict.txt``; fairseq adds four symbols of its own.
        sha256: identifies the tokenizer: over its files' paths and content.
        files: what ``tokenizer/`` holds.
    """

    kind: Annotated[str, Meta(pattern="^(tokenizers|sentencepiece)$")]
    vocab_size: Positive
    sha256: Sha256
    files: tuple[StreamFile, ...]

    @classmethod
    def describe(cls, kind: str, vocab_size: int, files: Iterable[StreamFile]) -> "TokenizerEntry":
        """Build the entry of the tokenizer that consists of these files."""
        files = tuple(files)
        return cls(kind, vocab_size, canonical_sha256([[file.path, file.sha256] for file in files]), files)


@dataclass(frozen=True)
class ImagesEntry:
    """What the manifest says of a stream's images; the splits are indices into them.

    Attributes:
        dataset: what they are, such as ``mnist``.
        shape: ``(C, H, W)`` of one image.
        num_classes: labels are from 0 to ``num_classes - 1``.
        mean: per channel, of the published training images, in units 0 to 1.
        std: per channel, as ``mean``; 1 where all pixels of the channel are equal, so that it can be divided by.
        augment: whether training crops (after padding by 4) and flips at random, as is usual for natural images.
        files: ``images.npy``, uint8 ``(num_images, C, H, W)``, and ``labels.npy``, int64 ``(num_images,)``; the
            published training images come first, then the test images.
    """

    dataset: Name
    shape: tuple[Side, Side, Side]
    num_classes: Positive
    mean: tuple[Union[int, float], ...]
    std: tuple[Amount, ...]
    augment: bool
    files: tuple[StreamFile, ...]

    def __post_init__(self) -> None:
        if {len(self.mean), len(self.std)} != {self.shape[0]}:
            raise ValueError(f"{len(self.mean)} mean and {len(self.std)} std found, {self.shape[0]} channels need each")
        if not all(-1e6 < each < 1e6 for each in self.mean) or min(self.std) <= 0:
            raise ValueError("numbers for mean and numbers above 0 for std are needed")


class CommandRecord(Struct, frozen=True):
    """What the manifest's history says of each command that made the stream; what it counted stands beside."""

    command: Name
    options: dict[str, Any]
    inputs: tuple[Mapping[str, Any], ...]


def canonical_sha256(content: Any) -> str:
    """Return the sha256 of a JSON value in its canonical spelling."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
