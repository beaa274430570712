"""A stream on disk: the manifest ``stream.json``, its splits and their files.

The manifest names every file with its size and sha256, so that whoever trains on a stream can tell that it is whole
and that it is the one a run began with. It is plain JSON; nothing here needs fairseq or torch.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional, Union

from fairseq_alma.data.file_errors import naming
from fairseq_alma.errors import AlmaError

FORMAT_VERSION = 1
MANIFEST = "stream.json"
KINDS = ("text", "images")


def megabatch_name(megabatch: int) -> str:
    """Return the name of a mega-batch's split, for instance ``megabatch-000/train``."""
    return f"megabatch-{megabatch:03d}/train"


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
        name: ``megabatch-000/train``, ``valid`` or ``test``; the files are ``name`` plus ``.bin`` and ``.idx``.
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
        return cls(kind, vocab_size, _canonical_sha256([[file.path, file.sha256] for file in files]), files)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "TokenizerEntry":
        """Build the entry from the manifest's JSON."""
        files = tuple(StreamFile(**entry) for entry in content["files"])
        return cls(content["kind"], content["vocab_size"], content["sha256"], files)


@dataclass(frozen=True)
class Stream:
    """A stream: B mega-batches, a validation set and a test set under one folder.

    Attributes:
        root: the stream's folder.
        kind: ``text`` or ``images``.
        seed: what the documents were dealt with.
        splits: the mega-batches in order of arrival, then ``valid`` and ``test``.
        tokenizer: only in a stream of text.
        dictionary: the file ``dict.txt``, only in a stream of text.
        other_files: what belongs to the stream beside the files above.
        history: the commands that made it, each with its options and a digest of every input file.
    """

    root: Path
    kind: str
    seed: int
    splits: tuple[Split, ...]
    tokenizer: Optional[TokenizerEntry] = None
    dictionary: Optional[StreamFile] = None
    other_files: tuple[StreamFile, ...] = ()
    history: tuple[Mapping[str, Any], ...] = field(default=())

    @classmethod
    def open(cls, path: Union[str, Path]) -> "Stream":
        """Read and check ``path/stream.json``.

        Raises:
            AlmaError: there is no manifest, or it is damaged or of another format version.
        """
        root = Path(path)
        manifest = root / MANIFEST
        content = _read_json(manifest)
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise AlmaError(
                f"{manifest}: format version {version} found, this version of fairseq_alma reads {FORMAT_VERSION}; "
                "prepare the stream again, or install the version that wrote it"
            )
        if content.get("kind") not in KINDS:
            raise AlmaError(f"{manifest}: kind {content.get('kind')!r} found, it must be one of {', '.join(KINDS)}")
        try:
            return cls._from_json(root, content)
        except (KeyError, TypeError, AttributeError) as error:
            raise AlmaError(f"{manifest}: damaged ({error}); prepare the stream again") from error

    @classmethod
    def _from_json(cls, root: Path, content: Mapping[str, Any]) -> "Stream":
        stream = cls(
            root=root,
            kind=content["kind"],
            seed=content["seed"],
            splits=tuple(Split.from_json(entry) for entry in content["splits"]),
            tokenizer=TokenizerEntry.from_json(content["tokenizer"]) if content["tokenizer"] else None,
            dictionary=StreamFile(**content["dictionary"]) if content["dictionary"] else None,
            other_files=tuple(StreamFile(**entry) for entry in content["other_files"]),
            history=tuple(content["history"]),
        )
        if stream.num_megabatches != content["num_megabatches"]:
            raise KeyError(f"{content['num_megabatches']} mega-batches announced, {stream.num_megabatches} listed")
        return stream

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's content."""
        content = asdict(self)
        del content["root"]
        return {"format_version": FORMAT_VERSION, "num_megabatches": self.num_megabatches, **content}

    @property
    def num_megabatches(self) -> int:
        """Number of mega-batches B."""
        return sum(split.name.startswith("megabatch-") for split in self.splits)

    @property
    def fingerprint(self) -> str:
        """Identify the stream: the same text, options and seed give the same fingerprint on any machine."""
        return self.fingerprint_of_first(self.num_megabatches)

    def fingerprint_of_first(self, num_megabatches: int) -> str:
        """Return the fingerprint that the stream had when it consisted of its first mega-batches.

        A stream grows by ``--append`` and its fingerprint changes; a run that began before can still see that what
        it has used is untouched.

        Args:
            num_megabatches: from 1 to B.
        """
        names = {megabatch_name(t) for t in range(num_megabatches)} | {"valid", "test"}
        content = self.to_json()
        return _canonical_sha256(
            {
                "format_version": FORMAT_VERSION,
                "kind": self.kind,
                "seed": self.seed,
                "tokenizer": content["tokenizer"],
                "dictionary": content["dictionary"],
                "splits": [split for split in content["splits"] if split["name"] in names],
            }
        )

    @property
    def dictionary_sha256(self) -> str:
        """The sha256 of ``dict.txt``, which identifies the vocabulary."""
        if self.dictionary is None:
            raise AlmaError(f"{self.root}: a stream of {self.kind} has no dict.txt; give a stream of text")
        return self.dictionary.sha256

    def megabatch(self, megabatch: int) -> Split:
        """Return the mega-batch of this number, 0 to B-1.

        Raises:
            AlmaError: there is no such mega-batch.
        """
        if not 0 <= megabatch < self.num_megabatches:
            raise AlmaError(
                f"{self.root}: no mega-batch {megabatch}, the stream has {self.num_megabatches}; "
                f"give a number from 0 to {self.num_megabatches - 1}"
            )
        return self.split(megabatch_name(megabatch))

    def split(self, name: str) -> Split:
        """Return a split by its name.

        Raises:
            AlmaError: there is no such split.
        """
        for split in self.splits:
            if split.name == name:
                return split
        raise AlmaError(f"{self.root}: no split {name!r}; choose from {', '.join(split.name for split in self.splits)}")

    def prefix(self, split: Split) -> Path:
        """Return the path of a text split's files without ``.bin`` and ``.idx``."""
        return self.root / split.name

    def verify(self, names: Iterable[str]) -> None:
        """Check size and sha256 of ``dict.txt``, the tokenizer and the files of some splits.

        Args:
            names: names of the splits to check.

        Raises:
            AlmaError: a file is missing, too short, too long or altered.
        """
        files = [self.dictionary] if self.dictionary else []
        files += self.tokenizer.files if self.tokenizer else ()
        for name in names:
            files += self.split(name).files
        for file in files:
            file.verify(self.root)


def write_manifest(stream: Stream, path: Path) -> None:
    """Write a stream's manifest and have it on the disk.

    Args:
        stream: what to write; its ``root`` is left out.
        path: the file, ``stream.json`` in the stream's folder or on its way there.
    """
    with naming(path), open(path, "w", encoding="utf-8") as file:
        json.dump(stream.to_json(), file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _read_json(manifest: Path) -> dict[str, Any]:
    """Return the JSON object that a manifest holds."""
    if not manifest.is_file():
        raise AlmaError(
            f"{manifest.parent}: there is no {MANIFEST}, so this is not a stream; "
            "give a folder that alma-prep-text has written (its --out)"
        )
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
    except ValueError as error:
        raise AlmaError(f"{manifest}: damaged, not JSON ({error}); prepare the stream again") from error
    if not isinstance(content, dict):
        raise AlmaError(f"{manifest}: damaged, a {type(content).__name__} found where a JSON object is needed")
    return content


def _canonical_sha256(content: Any) -> str:
    """Return the sha256 of a JSON value in its canonical spelling."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
