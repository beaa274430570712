"""Write files and folders atomically, lock runs, read records and compressed files, and verify zip archives.

The writer of a file ``NAME`` creates and locks ``.NAME.tmp`` in the same folder, and renames ``.NAME.tmp`` to ``NAME``
at the end. For a folder, the temporary name is ``.NAME.building``. The next writer replaces the temporary files of a
killed writer. This module does not import torch.

The first bytes of a file determine its compression, so standard input and files without a suffix can be compressed too.
Like gzip, bzip2, xz and zstd, `DecompressedFile` reads files with several members, and skips padding, empty frames and
skippable frames. xopen and fsspec have two disadvantages: they stop at a damaged second member of bzip2 or xz data
without an error, and they do not limit the memory of decompression.
"""

import bz2
import contextlib
import errno
import fcntl
import functools
import gzip
import json
import lzma
import os
import re
import shutil
import socket
import time
import zipfile
from pathlib import Path
from typing import IO, Annotated, Any, BinaryIO, Callable, Container, Iterator, Mapping, Optional, TypeVar, Union

import msgspec
from msgspec import Meta

from fairseq_alma.errors import AlmaError, causes, refuse_irregular, refuse_unwritable, refusing_damage

LOCK_PATIENCE_SECONDS = 15.0  # Child processes of a killed process exit within this time and release its locks.
MAX_MEGABATCHES = 10_000
COMPRESSION_SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstandard", ".zstd": "zstandard"}
_MAGIC = {  # regular expression for the first bytes of a compressed file -> format
    rb"\x1f\x8b": "gzip",
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": "bzip2",  # text may begin with BZh
    rb"\xfd7zXZ\x00": "xz",
    rb"\x28\xb5\x2f\xfd": "zstandard",
    rb"[\x50-\x5f]\x2a\x4d\x18": "zstandard",  # pzstd writes skippable frames
}
_READ_SIZE = 1 << 17
_LARGEST_CONTENT = 1 << 30  # bytes. Every file of a published data set is smaller.

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Amount = Union[Count, Annotated[float, Meta(ge=0, le=1.7e308)]]  # a finite number that is at least 0
Name = Annotated[str, Meta(min_length=1, max_length=1000)]
NumMegabatches = Annotated[int, Meta(ge=1, le=MAX_MEGABATCHES)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
FileIdentity = tuple[int, ...]

Record = TypeVar("Record")
Result = TypeVar("Result")


@contextlib.contextmanager
def _claimed(path: Path, flags: int, refusal: str, operation: int = fcntl.LOCK_EX) -> Iterator[int]:
    """Open and lock a file or folder, and yield the file descriptor.

    If another process renames or removes the file or folder before this process has the lock, open the path again.
    Raises AlmaError if another process holds the lock after `LOCK_PATIENCE_SECONDS`; the message begins with `refusal`.
    """
    deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
    while True:
        (path if flags & os.O_DIRECTORY else path.parent).mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o666)
        try:
            try:
                fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = "" if flags & os.O_DIRECTORY else os.pread(descriptor, 100, 0).decode(errors="replace")
                    by = f" (process {holder})" if " on " in holder else ""
                    raise AlmaError(f"{refusal}{by} holds the lock; wait until that process exits") from None
                time.sleep(0.1)
                continue
            except OSError as error:
                raise AlmaError(f"{path}: cannot be locked ({error.strerror}); use another file system") from error
            file = os.fstat(descriptor)
            if (file_identity(path) or ())[:2] == (file.st_dev, file.st_ino):
                yield descriptor
                return
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def open_atomically(path: Path, mode: str = "wb", durable: bool = True) -> Iterator[IO]:
    """Open a temporary file for writing. After the block, rename this file to `path`; on an exception, remove it.

    Args:
        path: path of the file; the parent folder is created if it does not exist.
        mode: ``wb``, or ``w`` for text in UTF-8.
        durable: whether to fsync the file and its folder. Otherwise, a system crash may lose or truncate the file.

    Raises:
        AlmaError: `path` exists and is not a regular file.
        OSError: the file cannot be written. The error names `path`, even if torch raised an error of another type.
    """
    refuse_irregular(path)
    temporary = path.with_name(f".{path.name}.tmp"[:255])
    try:
        with _claimed(temporary, os.O_RDWR | os.O_CREAT, f"{path}: another process") as descriptor:
            try:
                os.ftruncate(descriptor, 0)
                with open(descriptor, mode, encoding=None if mode == "wb" else "utf-8", closefd=False) as file:
                    yield file
                if durable:
                    os.fsync(descriptor)
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        if durable:
            synchronise(path.parent)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if writing fails.
        cause = next((each for each in causes(error) if isinstance(each, OSError)), None)
        if cause is None:
            raise
        raise OSError(cause.errno or errno.EIO, cause.strerror or str(cause), str(path)) from error


def sweep(*folders: Path) -> None:
    """Remove temporary files of killed writers and of fairseq; the caller must hold the locks of the ``folders``."""
    for folder in folders:
        for path in (*folder.glob(".*.tmp"), *folder.glob("checkpoint*.pt.tmp")):
            path.unlink(missing_ok=True)


def synchronise(*paths: Path) -> None:
    """Fsync files and directories. For a directory, this covers its entries, but not the content of its files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def synchronise_tree(root: Path) -> None:
    """Fsync a folder, and all files and folders below the folder except symbolic links."""
    synchronise(root, *(path for path in root.rglob("*") if not path.is_symlink()))


def refuse_existing(out: Path, force: bool) -> None:
    """Raise AlmaError if the file ``--out`` cannot be written, or exists and ``--force`` is not given."""
    refuse_irregular(out, "--out ")
    if out.exists() and not force:
        raise AlmaError(f"--out {out}: exists already; give another name, or --force to replace the file")
    refuse_unwritable(out, "--out")


@contextlib.contextmanager
def _removing_unused(folder: Path, names: Container[str] = ()) -> Iterator[None]:
    """After the block, remove a new folder that has only files with `names`, and its new parents if they are empty."""
    new = [each for each in (folder, *folder.absolute().parents) if not each.exists()]
    try:
        yield
    finally:
        if folder in new and folder.is_dir() and all(each.name in names for each in folder.iterdir()):
            shutil.rmtree(folder)
        with contextlib.suppress(OSError):  # not empty
            for each in new:
                each.rmdir() if each.exists() else None


@contextlib.contextmanager
def work_folder(out: Path, program: str) -> Iterator[Path]:
    """Yield an empty, locked folder next to `out`; remove the folder at the end of the block.

    Args:
        out: folder that the command creates; see `publish`.
        program: name of the command, for messages.

    Raises:
        AlmaError: another process is creating the same folder.
    """
    refuse_unwritable(out, "--out")
    real = Path(os.path.realpath(out))
    work = real.with_name(f".{real.name}.building")
    with _removing_unused(work), _claimed(work, os.O_RDONLY | os.O_DIRECTORY, f"{out}: another {program}"):
        for each in work.iterdir():  # left by a killed command
            shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def publish(work: Path, out: Path) -> None:
    """Fsync a complete folder and rename it to `out`; `out` must be an empty folder or must not exist.

    Raises:
        AlmaError: `out` is a file, or a folder that is not empty.
    """
    synchronise_tree(work)
    real = Path(os.path.realpath(out))
    try:
        os.rename(work, real)
    except OSError as error:
        raise AlmaError(f"--out {out}: {error.strerror}; give the name of a new folder") from error
    synchronise(real.parent)


@contextlib.contextmanager
def locked(
    path: Path, what: str, shared: bool = False, who: str = "alma-stream", unused: Container[str] = ()
) -> Iterator[int]:
    """Hold the lock of a run, or of a stage or member of a run.

    Args:
        path: lock file; the file and its folder are created if they do not exist. The file contains the process id and
            host name of the last process that took the lock.
        what: path of the locked run, stage or member, for messages.
        shared: whether to take a shared lock, which several processes can hold.
        who: name of the command, for messages.
        unused: names of files. If the folder is new and gets only such files, remove the folder at the end.

    Yields:
        File descriptor of the lock. A child process that inherits the descriptor keeps the lock until it exits.

    Raises:
        AlmaError: another process holds the lock after `LOCK_PATIENCE_SECONDS`.
    """
    with (
        _removing_unused(path.parent, unused),
        _claimed(
            path, os.O_RDWR | os.O_CREAT, f"{what}: another {who}", fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        ) as descriptor,
    ):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield descriptor


def write_json_atomically(path: Path, content: Mapping[str, Any], durable: bool = True) -> None:
    """Write a JSON file atomically; see `open_atomically` for `durable`."""
    with open_atomically(path, "w", durable) as file:
        file.write(json.dumps(content, indent=2) + "\n")


def read_json_object(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object, which may contain ``NaN`` and ``Infinity`` (results of diverged models).

    Raises:
        AlmaError: the file is not a JSON object; the message ends with `remedy`.
    """
    try:
        parsed = json.loads(path.read_bytes())
    except (RecursionError, ValueError) as error:
        raise AlmaError(f"{path}: damaged: not JSON ({error}); {remedy}") from error
    if not isinstance(parsed, dict):
        raise AlmaError(f"{path}: damaged: expected a JSON object, found {type(parsed).__name__}; {remedy}")
    return parsed


def require_version(version: Any, known: int, path: Path, remedy: str) -> None:
    """Raise AlmaError unless ``version``, the format version in the file ``path``, is ``known``."""
    if version != known:
        old = " of fairseq_alma 0.2.0 or older" if version in (None, 1) else ""
        raise AlmaError(f"{path}: expected format version {known}, found {version!s:.60}{old}; {remedy}")


def as_record(content: Mapping[str, Any], kind: type[Record], path: Path, remedy: str) -> Record:
    """Convert a JSON object to a ``msgspec.Struct`` or dataclass; ignore unknown keys.

    Args:
        content: JSON object.
        kind: type of the record.
        path: file of the record, for messages.
        remedy: next step, for messages.

    Raises:
        AlmaError: a key is missing, or a value has a wrong type or range. The message contains the key.
    """
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        fault, _, place = str(error).replace("`", "").partition(" - at ")
        raise AlmaError(f"{path}: damaged, {f'{place}: ' if place else ''}{fault}; {remedy}") from error


def file_identity(path: Path) -> Optional[FileIdentity]:
    """Return (device, inode, size, mtime, ctime), a cache key of the file; None if the file is not accessible."""
    try:
        file = path.stat()
    except OSError:
        return None
    return file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns


def once_per_file(read: Callable[[Path], Result]) -> Callable[[Path], Result]:
    """Decorate a function that reads one file: cache the result until the file changes."""
    cached = functools.lru_cache(maxsize=10_000)(lambda path, identity: read(path))
    return functools.wraps(read)(lambda path: cached(path, file_identity(path)))


@once_per_file
def archive_fault(path: Path) -> Optional[str]:
    """Return the fault of a checkpoint with a wrong checksum, or None; ``torch.load`` does not verify checksums."""
    if not zipfile.is_zipfile(path):
        return f"not a checkpoint, or truncated ({path.stat().st_size:,} bytes, not a zip archive)"
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # BadZipFile, NotImplementedError, RuntimeError, struct.error and others
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: negative offset in the file
            raise
        return f"damaged or truncated: cannot read the zip directory ({error})"
    return None if damaged is None else f"damaged: the checksum of {damaged!r} in the archive is wrong"


class DecompressedFile:
    """Reader of the decompressed content of a file.

    Args:
        raw: binary file object, positioned at the start of the file.
        label: name of the file in messages.

    Attributes:
        is_packed: whether the file is compressed.

    Raises:
        AlmaError: the name has a compression suffix, but the content is not compressed.
    """

    def __init__(self, raw: BinaryIO, label: str) -> None:
        self._raw, self._label = raw, label
        start, suffix = raw.read(10), Path(raw.name).suffix
        raw.seek(0)
        self._kind = next((kind for magic, kind in _MAGIC.items() if re.match(magic, start)), "")
        self.is_packed = bool(self._kind)
        if suffix in COMPRESSION_SUFFIXES and not self.is_packed:
            expected, found = COMPRESSION_SUFFIXES[suffix], f"data that begins with {start!r}" if start else "no data"
            raise AlmaError(f"{label}: expected {expected} data, found {found}; download the file again")
        self._pieces = _decompressed(raw, self._kind, label)
        self._ready = bytearray()
        self._num_bytes = 0

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes of content, or all remaining bytes if fewer remain.

        Raises:
            AlmaError: the compressed data is broken or truncated, or zstandard is not installed.
        """
        if not self.is_packed:
            return self._raw.read(size)
        with refusing_damage(
            f"{self._label}: broken {self._kind} data after {self._num_bytes:,} bytes of content",
            "download or compress the file again",
        ):
            while len(self._ready) < size and (piece := next(self._pieces, None)) is not None:
                self._ready += piece
        content = bytes(self._ready[:size])
        del self._ready[:size]
        self._num_bytes += len(content)
        return content


def _decompressed(raw: BinaryIO, kind: str, label: str) -> Iterator[bytes]:
    # The content is that of all members or frames, without padding (NUL bytes between or after members).
    if kind == "gzip":
        yield from iter(functools.partial(gzip.GzipFile(fileobj=raw).read, _READ_SIZE), b"")
        return
    read_size, limit = _READ_SIZE, [_READ_SIZE]
    new: Callable[[], Any] = bz2.BZ2Decompressor
    if kind == "xz":
        # 512 MiB; decompressing the output of xz -9 needs 65 MiB.
        new = functools.partial(lzma.LZMADecompressor, memlimit=1 << 29)
    elif kind == "zstandard":
        try:
            import zstandard
        except ImportError as error:
            raise AlmaError(f"{label}: zstandard is not installed; run pip install zstandard") from error
        # the window of zstd --long=31 in bytes; zstandard allocates less memory for a small frame
        new = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        read_size, limit = 1 << 12, []  # zstandard decompresses each input at once, to at most 30,000 times the size.
    rest = b""
    while True:
        while not (rest := rest.lstrip(b"\0")):
            if not (rest := raw.read(read_size)):
                return
        member = new()
        while not member.eof:
            if not rest and getattr(member, "needs_input", True) and not (rest := raw.read(read_size)):
                raise EOFError("unexpected end of file")
            yield member.decompress(rest, *limit)
            rest = b""
        rest = member.unused_data


def read_file(path: Path) -> bytes:
    """Return the decompressed content of a file. Raises AlmaError if the data is damaged or too large."""
    with open(path, "rb") as raw:
        content = DecompressedFile(raw, str(path)).read(_LARGEST_CONTENT + 1)
    if len(content) > _LARGEST_CONTENT:
        raise AlmaError(f"{path}: expected at most {_LARGEST_CONTENT >> 20} MiB of content; download the file again")
    return content
