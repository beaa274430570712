"""Read, check and write ``stream.json``, the manifest of a stream: files, splits, tokenizer, images.

The manifest lists the size and sha256 of all other files, so that a reader can check them. A new stream appears
atomically; an addition appears when a new manifest replaces the old one. Imports neither fairseq nor torch.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Iterable, Mapping, Optional, Sequence, Union

from msgspec import Meta, Struct

from fairseq_alma.errors import AlmaError
from fairseq_alma.files import (
    MAX_MEGABATCHES,
    Amount,
    Count,
    Name,
    Positive,
    Sha256,
    as_record,
    once_per_file,
    open_atomically,
    publish,
    read_json_object,
    require_version,
    synchronise_tree,
)

MANIFEST = "stream.json"
FORMAT_VERSION = 2
DICTIONARY = "dict.txt"
IMAGES = "images.npy"
LABELS = "labels.npy"
# option of alma-prep-text: n-gram size in words; the history of a stream records null for --no-decontaminate
DECONTAMINATE = "--decontaminate-ngram"
_REMEDY = "prepare the stream again"

Side = Annotated[int, Meta(ge=1, le=1 << 20)]


@once_per_file
def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's content in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_sha256(content: Any) -> str:
    """Return the sha256 of a value in canonical JSON (sorted keys, no white space)."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class StreamFile:
    """Manifest entry of a file: path relative to the folder of the stream, size in bytes, sha256 of the content."""

    path: Name
    size: Count
    sha256: Sha256

    def __post_init__(self) -> None:
        path = PurePosixPath(self.path)
        if not path.name or path.is_absolute() or ".." in path.parts or str(path) != self.path or "\0" in self.path:
            raise ValueError(f"expected a path within the folder of the stream, found {self.path!r}")

    @classmethod
    def describe(cls, root: Path, path: str) -> "StreamFile":
        """Return the manifest entry of the file ``root/path``, with the current size and sha256."""
        return cls(path, (root / path).stat().st_size, file_sha256(root / path))

    def verify(self, root: Path) -> None:
        """Raise AlmaError unless the file exists in the folder ``root`` and has the recorded size and sha256."""
        path = root / self.path
        remedy = "prepare the stream again, or restore this file from a copy"
        if not path.is_file():
            raise AlmaError(f"{path}: expected a file of {self.size} bytes as in {MANIFEST}, found no file; {remedy}")
        if (size := path.stat().st_size) != self.size:
            raise AlmaError(f"{path}: expected {self.size} bytes as in {MANIFEST}, found {size}; {remedy}")
        if (sha256 := file_sha256(path)) != self.sha256:
            raise AlmaError(f"{path}: expected sha256 {self.sha256} as in {MANIFEST}, found {sha256}; {remedy}")


@dataclass(frozen=True)
class Split:
    """Split of a stream: training, held-out or validation data of a mega-batch, or the set ``valid`` or ``test``."""

    name: Name  # `split_name` for the data of a mega-batch, or ``valid`` or ``test``
    files: tuple[StreamFile, ...]  # ``name`` plus ``.bin`` and ``.idx`` for text, ``.npy`` for images
    num_documents: Count = 0  # number of documents; the token file has one sequence, ending with EOS, for each document
    num_words: Count = 0  # number of words, separated by white space
    num_tokens: Count = 0  # number of ids in the token file, including one EOS for each document
    num_bytes: Count = 0  # number of UTF-8 bytes of the documents
    num_images: Count = 0  # number of images, in a stream of images

    def bits_per_byte(self, loss: float) -> Optional[float]:
        """Convert a mean loss in bits per token to bits per byte, or return None for an empty split."""
        return loss * self.num_tokens / self.num_bytes if self.num_bytes else None


@dataclass(frozen=True)
class TokenizerEntry:
    """Manifest entry of the tokenizer of a stream of text."""

    # ``tokenizers`` (a ``tokenizer.json``) or ``sentencepiece`` (a ``.model``)
    kind: Annotated[str, Meta(pattern="^(tokenizers|sentencepiece)$")]
    vocab_size: Positive  # number of tokens, without the four symbols of fairseq; also number of lines of ``dict.txt``
    sha256: Sha256  # sha256 of a JSON list of the path and sha256 of each file
    files: tuple[StreamFile, ...]  # entries of the files in ``tokenizer/``

    @classmethod
    def describe(cls, kind: str, vocab_size: int, files: Sequence[StreamFile]) -> "TokenizerEntry":
        """Return the manifest entry of a tokenizer that consists of ``files``."""
        return cls(kind, vocab_size, canonical_sha256([[file.path, file.sha256] for file in files]), tuple(files))


@dataclass(frozen=True)
class ImagesEntry:
    """Manifest entry of the images of a stream; each split is a file of image indices."""

    dataset: Name  # name of the data set, such as ``mnist``
    shape: tuple[Side, Side, Side]  # ``(C, H, W)`` of one image
    num_classes: Positive  # number of classes; labels are from 0 to ``num_classes - 1``
    mean: tuple[Union[int, float], ...]  # mean of each channel over the published training images, from 0 to 1
    # standard deviation of each channel, with pixels from 0 to 1; 1 if all pixels of the channel are equal
    std: tuple[Amount, ...]
    augment: bool  # whether training crops (after padding by 4) and flips images at random
    # ``images.npy``, uint8 ``(num_images, C, H, W)``, and ``labels.npy``, int64 ``(num_images,)``; the published
    # training images come first, then the test images
    files: tuple[StreamFile, ...]

    def __post_init__(self) -> None:
        if {len(self.mean), len(self.std)} != {self.shape[0]}:
            raise ValueError(
                f"expected {self.shape[0]} means and stds, found {len(self.mean)} means and {len(self.std)} stds"
            )
        if not all(-1e6 < each < 1e6 for each in self.mean) or min(self.std) <= 0:
            raise ValueError(f"expected finite mean and positive std, found {self.mean!s:.60} and {self.std!s:.60}")


class CommandRecord(Struct, frozen=True):
    """Manifest entry of a command that wrote to the stream. For text, this entry has more keys, such as ``splits``."""

    command: Name
    options: dict[str, Any]
    inputs: tuple[Mapping[str, Any], ...]


def split_name(megabatch: int, part: str = "train") -> str:
    """Return the name of a split of a mega-batch, such as ``megabatch-000/train``.

    Args:
        megabatch: number of the mega-batch, numbered from 0.
        part: ``train``, ``holdout`` (held-out documents of text) or ``valid`` (images).
    """
    return f"megabatch-{megabatch:03d}/{part}"


def split_names(kind: str, num_megabatches: int, has_holdouts: bool) -> list[str]:
    """Return the names of a stream's splits, in the order of the manifest."""
    parts = ("train",) if kind == "text" else ("train", "valid")
    names = [split_name(t, part) for t in range(num_megabatches) for part in parts]
    names += [split_name(t, "holdout") for t in range(num_megabatches)] if has_holdouts else []
    return [*names, "valid", "test"]


@dataclass(frozen=True)
class Stream:
    """A stream: B mega-batches, a validation set and a test set in one folder."""

    root: Path  # folder of the stream
    kind: Annotated[str, Meta(pattern="^(text|images)$")]  # ``text`` or ``images``
    seed: Count  # random seed for assigning documents or images to the splits
    splits: tuple[Split, ...]  # splits in the order of `split_names`
    tokenizer: Optional[TokenizerEntry] = None  # entry of the tokenizer; None for images
    dictionary: Optional[StreamFile] = None  # entry of ``dict.txt``; None for images
    images: Optional[ImagesEntry] = None  # entry of the images; None for text
    other_files: tuple[StreamFile, ...] = ()  # entries of the remaining files
    # records of the commands that made the stream, each with options and the sha256 of every input file
    history: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def open(cls, path: Union[str, Path], kind: Optional[str] = None) -> "Stream":
        """Return the stream in the folder ``path``, after checks of the manifest but not of the other files.

        Raises:
            AlmaError: the manifest is missing, damaged or incomplete, or has another format version; or the stream is
                not of the given ``kind`` (``text`` or ``images``).
        """
        root = Path(path)
        manifest = root / MANIFEST
        if not manifest.is_file():
            raise AlmaError(
                f"{root}: not a stream (no {MANIFEST} found); give the --out of alma-prep-text or alma-prep-images"
            )
        content = read_json_object(manifest, _REMEDY)
        require_version(
            content.get("format_version"),
            FORMAT_VERSION,
            manifest,
            "prepare the stream again, or install the version of fairseq_alma that wrote the stream",
        )
        stream = as_record({**content, "root": root}, cls, manifest, _REMEDY)
        for entry in stream.history:
            as_record(entry, CommandRecord, manifest, _REMEDY)
        if fault := stream._fault(content.get("num_megabatches")):
            raise AlmaError(f"{manifest}: damaged, {fault}; {_REMEDY}")
        if kind not in (None, stream.kind):
            raise AlmaError(f"{root}: expected a stream of {kind}, found {stream.kind}; give another stream")
        return stream

    def _fault(self, announced: object) -> Optional[str]:
        """Describe the first error in the manifest, or return None; ``announced``: ``num_megabatches`` in the file."""
        if announced != self.num_megabatches:
            return f"expected {announced!r:.60} mega-batches as in num_megabatches, found {self.num_megabatches}"
        if not 1 <= self.num_megabatches <= MAX_MEGABATCHES:
            return f"expected 1 to {MAX_MEGABATCHES} mega-batches, found {self.num_megabatches}"
        names = split_names(self.kind, self.num_megabatches, self.has_holdouts)
        if (found := [each.name for each in self.splits]) != names:
            if missing := [name for name in names if name not in self._by_name]:
                return f"no split {', '.join(missing[:3])}"
            return (
                f"expected {len(names)} splits, from {names[0]} to {names[-1]} in order, found {len(found)} splits, "
                "out of order or with extra splits"
            )
        suffixes = (".bin", ".idx") if self.kind == "text" else (".npy",)
        lists = [(each.name, [f"{each.name}{suffix}" for suffix in suffixes], each.files) for each in self.splits]
        if self.kind == "images":
            lists += [("images", [IMAGES, LABELS], self.images.files if self.images else ())]
        elif self.tokenizer is None or not self.tokenizer.files:
            return "expected a tokenizer in a stream of text, found none"
        else:
            lists += [("dictionary", [DICTIONARY], (self.dictionary,) if self.dictionary else ())]
        for what, needed, files in lists:
            if (paths := [file.path for file in files]) != needed:
                return f"{what}: expected files {', '.join(needed)}, found {', '.join(paths)[:200] or 'none'}"
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``stream.json``."""
        content = asdict(self)
        del content["root"]
        return {"format_version": FORMAT_VERSION, "num_megabatches": self.num_megabatches, **content}

    @cached_property
    def num_megabatches(self) -> int:
        return sum(split.name.startswith("megabatch-") and split.name.endswith("/train") for split in self.splits)

    @cached_property
    def has_holdouts(self) -> bool:
        """Return whether each mega-batch has a split of held-out documents; False for images."""
        return self.kind == "text" and any(split.name == split_name(0, "holdout") for split in self.splits)

    @property
    def decontaminated(self) -> Optional[int]:
        """Return the maximum n-gram size of decontamination in words, or None if any command did not decontaminate."""
        sizes = [entry["options"].get(DECONTAMINATE) for entry in self.history]
        return max(sizes) if sizes and all(isinstance(size, int) for size in sizes) else None

    @property
    def fingerprint(self) -> str:
        """Return an identifier, equal on all machines: the sha256 of seed, vocabulary, images and splits."""
        return self.fingerprint_of_first(self.num_megabatches)

    def fingerprint_of_first(self, num_megabatches: int) -> str:
        """Return the fingerprint of the stream with only its first ``num_megabatches`` mega-batches."""
        names = {*split_names(self.kind, num_megabatches, self.has_holdouts)}
        content = self.to_json()
        covered = {key: content[key] for key in ("format_version", "kind", "seed", "tokenizer", "dictionary", "images")}
        covered["splits"] = [split for split in content["splits"] if split["name"] in names]
        return canonical_sha256(covered)

    @property
    def dictionary_sha256(self) -> str:
        """Return the sha256 of ``dict.txt``, which identifies the vocabulary of a stream of text."""
        assert self.dictionary is not None
        return self.dictionary.sha256

    def megabatch(self, megabatch: int) -> Split:
        """Return the training split of mega-batch 0 to B - 1. Raises AlmaError if the mega-batch does not exist."""
        if not 0 <= megabatch < self.num_megabatches:
            raise AlmaError(
                f"{self.root}: no mega-batch {megabatch}; give a number from 0 to {self.num_megabatches - 1}"
            )
        return self.split(split_name(megabatch))

    def split(self, name: str) -> Split:
        """Return the split ``name``, such as ``valid``. Raises AlmaError if the split does not exist."""
        if name not in self._by_name:
            raise AlmaError(f"{self.root}: no split {name!r}; choose from {', '.join(self._by_name)}")
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> Mapping[str, Split]:
        return {split.name: split for split in self.splits}

    def verify(self, names: Iterable[str]) -> None:
        """Raise AlmaError unless dictionary, tokenizer, images and the files of splits ``names`` match the manifest."""
        files = [self.dictionary] if self.dictionary else []
        files += self.tokenizer.files if self.tokenizer else ()
        files += self.images.files if self.images else ()
        for file in [*files, *(file for name in names for file in self.split(name).files)]:
            file.verify(self.root)


def write_manifest(stream: Stream, path: Path) -> None:
    """Write the manifest of a stream atomically."""
    with open_atomically(path, "w") as file:
        file.write(json.dumps(stream.to_json(), indent=1, ensure_ascii=False) + "\n")


def publish_stream(built: Path, stream: Stream) -> None:
    """Publish the files in ``built`` as a new stream at ``stream.root``, or add them to the existing stream there.

    The manifest of an existing stream is written last. A file that a killed command left in the stream may have the
    same path as a new file; replace this file.

    Raises:
        AlmaError: a file or a folder of the existing stream is a symbolic link.
    """
    if not (stream.root / MANIFEST).exists():
        write_manifest(stream, built / MANIFEST)
        publish(built, stream.root)
        return
    synchronise_tree(built)
    files = sorted(path.relative_to(built) for path in built.rglob("*") if path.is_file())
    for path in (path for file in files for path in (file, *file.parents)):
        if path.name and (stream.root / path).is_symlink():
            raise AlmaError(
                f"--out {stream.root}: expected a file or a folder at {path}, found a symbolic link; replace the link "
                "with its target and run the command again"
            )
    for file in files:
        (stream.root / file).parent.mkdir(exist_ok=True)
        os.replace(built / file, stream.root / file)
    synchronise_tree(stream.root)
    write_manifest(stream, stream.root / MANIFEST)


def stream_at(out: Path, kind: str) -> Optional[Stream]:
    """Return the stream of ``kind`` in the folder ``--out``, or None if the folder does not exist or is empty.

    Raises:
        AlmaError: ``--out`` is a stream of another kind, a file, a folder of unrelated files, a circular link, or an
            empty mount point or current folder.
    """
    if (out / MANIFEST).exists():
        stream = Stream.open(out)
        if stream.kind != kind:
            raise AlmaError(f"--out {out}: expected a stream of {kind}, found {stream.kind}; choose another folder")
        return stream
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        found = "a folder with other files" if out.is_dir() else "a file"
        raise AlmaError(f"--out {out}: expected a stream or an empty folder, found {found}; choose another folder")
    is_current = out.exists() and os.path.samefile(out, os.curdir)
    is_circular = os.path.islink(os.path.realpath(out))
    if is_current or is_circular or os.path.ismount(out):
        found = "current folder" if is_current else "target of a circular link" if is_circular else "mount point"
        raise AlmaError(f"--out {out}: expected a new folder, found the {found}; choose another folder")
    return None


def refuse_other_command(out: Path, history: Sequence[Mapping[str, Any]], now: Mapping[str, Any], advice: str) -> None:
    """Raise AlmaError if options or input differ from those of the first command that wrote the stream ``--out``.

    Args:
        out: folder of the stream.
        history: records of the commands that made the stream, oldest first.
        now: record of the new command: ``options`` (flag -> value) and ``inputs`` (one record per input file).
        advice: next step for the user, appended to error messages.
    """
    if not history:
        raise AlmaError(f"--out {out}: the manifest does not record the command that made the stream; {advice}")
    before = history[0]
    for flag in {**before["options"], **now["options"]}:
        old, new = before["options"].get(flag), now["options"].get(flag)
        if old != new:
            old, new = (f"the default of {flag}" if value is None else f"{flag} {value}" for value in (old, new))
            raise AlmaError(f"--out {out}: the stream was made with {old}, not with {new}; {advice}")
    if before["inputs"] != now["inputs"]:
        changed = [str(new["name"]) for new in now["inputs"] if new not in before["inputs"]]
        difference = f"changed or new files: {', '.join(changed[:3])}" if changed else "missing or moved files"
        raise AlmaError(f"--out {out}: the stream was made from different input ({difference}); {advice}")


def recorded_name(path: Path) -> str:
    """Return a path for a manifest. An escape such as ``\\xff`` replaces each byte that is not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
