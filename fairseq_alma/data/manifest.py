"""What the manifest of a stream is made of: files, splits, the entries of the tokenizer and of the images.

The manifest names every file with its size and sha256, so that whoever trains on a stream can tell that it is whole.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Mapping

from fairseq_alma.errors import AlmaError

MANIFEST = "stream.json"


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's content in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class StreamFile:
    """One file of a stream: path relative to the stream's folder, size in bytes, sha256 of the content."""

    path: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        if (type(self.path), type(self.size), type(self.sha256)) != (str, int, str):
            raise TypeError(f"file {self.path!r} of size {self.size!r} and sha256 {self.sha256!r}")

    @classmethod
    def describe(cls, root: Path, path: str) -> "StreamFile":
        """Measure the file ``root/path``."""
        return cls(path, (root / path).stat().st_size, file_sha256(root / path))

    def verify(self, root: Path) -> None:
        """Raise AlmaError unless the file under ``root`` has this size and this content."""
        path = root / self.path
        remedy = "prepare the stream again, or copy this file again from where it is whole"
        if not path.is_file():
            raise AlmaError(f"{path}: no such file, but {MANIFEST} lists it with {self.size} bytes; {remedy}")
        size = path.stat().st_size
        if size != self.size:
            raise AlmaError(f"{path}: {size} bytes found, {MANIFEST} says {self.size}; {remedy}")
        sha256 = file_sha256(path)
        if sha256 != self.sha256:
            raise AlmaError(f"{path}: sha256 {sha256} found, {MANIFEST} says {self.sha256}; {remedy}")


@dataclass(frozen=True)
class Split:
    """One part of a stream: a mega-batch, the validation set or the test set.

    Attributes:
        name: ``megabatch-000/train``, ``valid`` or ``test``, and ``megabatch-000/valid`` in a stream of images; the
            files are ``name`` plus ``.bin`` and ``.idx`` for text, ``.npy`` for images.
        files: what the split consists of.
        num_documents: sequences in the token file, each ending with eos.
        num_words: white-space separated words of the text.
        num_tokens: ids in the token file, one eos per document included.
        num_bytes: UTF-8 bytes of the documents' text: what bits per byte are counted over.
        num_images: images, in a stream of images.
    """

    name: str
    files: tuple[StreamFile, ...]
    num_documents: int = 0
    num_words: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_images: int = 0

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Split":
        """Build a split from its entry in the manifest."""
        counts = {key: value for key, value in content.items() if key != "files"}
        if not all(type(value) is int for key, value in counts.items() if key != "name"):
            raise TypeError(f"counts {counts}")
        return cls(files=tuple(StreamFile(**entry) for entry in content["files"]), **counts)


@dataclass(frozen=True)
class TokenizerEntry:
    """What the manifest says of a text stream's tokenizer.

    Attributes:
        kind: ``tokenizers`` (a ``tokenizer.json``) or ``sentencepiece`` (a ``.model``).
        vocab_size: number of units, that is lines of ``dict.txt``; fairseq adds four symbols of its own.
        sha256: identifies the tokenizer: over its files' paths and content.
        files: what ``tokenizer/`` holds.
    """

    kind: str
    vocab_size: int
    sha256: str
    files: tuple[StreamFile, ...]

    @classmethod
    def describe(cls, kind: str, vocab_size: int, files: Iterable[StreamFile]) -> "TokenizerEntry":
        """Build the entry of the tokenizer that consists of these files."""
        files = tuple(files)
        return cls(kind, vocab_size, canonical_sha256([[file.path, file.sha256] for file in files]), files)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "TokenizerEntry":
        """Build the entry from the manifest's JSON."""
        files = tuple(StreamFile(**entry) for entry in content["files"])
        return cls(content["kind"], content["vocab_size"], content["sha256"], files)


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

    dataset: str
    shape: tuple[int, int, int]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: bool
    files: tuple[StreamFile, ...]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "ImagesEntry":
        """Build the entry from the manifest's JSON. Raises ValueError or TypeError if it cannot be one."""
        channels, height, width = content["shape"]
        sizes = (channels, height, width, content["num_classes"])
        if not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(f"shape {content['shape']} and {content['num_classes']} classes")
        mean, std = tuple(content["mean"]), tuple(content["std"])  # as they are: the fingerprint is over their spelling
        if {len(mean), len(std)} != {channels} or not all(map(math.isfinite, mean + std)) or min(std) <= 0:
            raise ValueError(f"mean {content['mean']} and std {content['std']} of {channels} channels")
        if not isinstance(content["augment"], bool):
            raise ValueError(f"augment {content['augment']!r}")
        return cls(
            dataset=content["dataset"],
            shape=(channels, height, width),
            num_classes=content["num_classes"],
            mean=mean,
            std=std,
            augment=content["augment"],
            files=tuple(StreamFile(**entry) for entry in content["files"]),
        )


def canonical_sha256(content: Any) -> str:
    """Return the sha256 of a JSON value in its canonical spelling."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
