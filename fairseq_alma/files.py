"""Files and folders that appear complete or not at all, locks, and JSON records that are checked against a type.

A file is written next to its place as ``.NAME.tmp``, a folder as ``.NAME.building``, both under a lock that ends with
the writer, and renamed: what a killed writer has left is replaced by the next one. No torch here.
"""

import contextlib
import errno
import fcntl
import functools
import io
import json
import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import IO, Annotated, Any, Callable, Iterator, Mapping, Optional, TypeVar, Union

import msgspec
from msgspec import Meta

from fairseq_alma.errors import AlmaError, refuse_irregular, refuse_unwritable

LOCK_PATIENCE_SECONDS = 30.0
_SETTLED = 0.1  # seconds; a file that was changed so recently may change again within one tick of its clock
LARGEST = 1 << 28  # bytes of a record; a manifest of 10,000 mega-batches takes a tenth
MAX_MEGABATCHES = 10_000

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Amount = Union[Count, Annotated[float, Meta(ge=0, le=1.7e308)]]
"""A finite number of at least 0."""
Name = Annotated[str, Meta(min_length=1, max_length=1000)]
NumMegabatches = Annotated[int, Meta(ge=1, le=MAX_MEGABATCHES)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]

Record = TypeVar("Record")
Result = TypeVar("Result")


class _RecordingFile(io.FileIO):
    """A file that remembers why it could not be written: torch says only that it could not."""

    failure: Optional[OSError] = None

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            self.failure = error
            raise


@contextlib.contextmanager
def open_atomically(path: Path, mode: str = "wb", durable: bool = True, replace: bool = True) -> Iterator[IO]:
    """Open a new file for writing that takes its place when the block ends, and leaves no trace if it raises.

    Args:
        path: the file; its folder is made. One that is there is replaced, never written into.
        mode: ``wb``, or ``w`` for text in UTF-8.
        durable: fsync file and folder. If not, a crash of the machine, but nothing else, may lose or tear the file.
        replace: False: a file that another command puts in its place meanwhile is kept.

    Raises:
        AlmaError: something else than a regular file is in its place, or it is not replaced.
        OSError: it cannot be written; always with the file's name, also where torch had raised something else.
    """
    refuse_irregular(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp"[:255])
    raw = None
    try:
        raw = _open_locked(temporary)
        buffered = io.BufferedWriter(raw)
        file: IO = buffered if mode == "wb" else io.TextIOWrapper(buffered, encoding="utf-8")
        yield file
        file.flush()
        if durable:
            os.fsync(raw.fileno())
        if not replace and path.exists():
            raise _existing(path)
        os.replace(temporary, path)
        if durable:
            synchronise_alone(path.parent)
    except BaseException as error:
        if raw is not None:
            temporary.unlink(missing_ok=True)
        cause = raw.failure if raw is not None and raw.failure is not None else error
        if isinstance(cause, OSError) and isinstance(error, (OSError, RuntimeError)):
            raise OSError(cause.errno or errno.EIO, cause.strerror or str(cause), str(path)) from error
        raise
    finally:
        if raw is not None:
            raw.close()


def _open_locked(temporary: Path) -> _RecordingFile:
    """Return an empty file that is locked; one that another writer has is waited for."""
    while True:
        raw = _RecordingFile(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "r+b")
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(raw, fcntl.LOCK_EX)
        if _is_at(temporary, raw.fileno()):  # else the other writer has renamed it
            raw.truncate(0)
            return raw
        raw.close()


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether a path still names an open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    return False


def sweep(folder: Path) -> None:
    """Remove the temporary files of killed writers; whoever calls it holds the folder's lock."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def synchronise_alone(path: Path) -> None:
    """Fsync a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def synchronise(path: Path) -> None:
    """Fsync a file and its parent directory."""
    synchronise_alone(path)
    synchronise_alone(path.parent)


def synchronise_tree(root: Path) -> None:
    """Fsync all files and folders."""
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            synchronise_alone(path)


def refuse_existing(out: Path, force: bool) -> None:
    """Raise AlmaError if the file that ``--out`` names may not be written; ``--force`` allows to replace it."""
    if out.is_dir():
        raise AlmaError(f"--out {out}: a folder; give the name of a file in it")
    refuse_irregular(out, "--out ")
    if out.exists() and not force:
        raise _existing(out)
    refuse_unwritable(out, "--out")


def _existing(out: Path) -> AlmaError:
    return AlmaError(f"--out {out}: exists already; give another name, or --force to replace it")


def refuse_occupied(path: Path, flag: str) -> None:
    """Raise AlmaError if anything but an empty folder is where a folder is to be made; a flag ends with a space."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise AlmaError(f"{flag}{path}: a file or a link is there; give the name of a new folder")
    if path.is_dir() and any(path.iterdir()):
        raise AlmaError(f"{flag}{path}: exists and is not empty; give the name of a new folder, or remove this one")


@contextlib.contextmanager
def work_folder(out: Path, program: str) -> Iterator[Path]:
    """Yield an empty folder next to ``out`` that this process alone uses, and that is removed at the end.

    Args:
        out: the folder to build.
        program: name of the command that builds it, for messages.

    Raises:
        AlmaError: another process builds the same.
    """
    work = Path(os.path.realpath(out))
    work = work.with_name(f".{work.name}.building")
    refuse_unwritable(out, "--out")
    while True:
        work.mkdir(parents=True, exist_ok=True)
        with _opened(work, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            _lock(descriptor, f"{out}", fcntl.LOCK_EX, program)
            if not _is_at(work, descriptor):
                continue  # another process has published it meanwhile
            for each in work.iterdir():  # of a command that was killed
                shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
            try:
                yield work
            finally:
                shutil.rmtree(work, ignore_errors=True)
            return


def publish(work: Path, out: Path, flag: str) -> None:
    """Rename a folder to its place, where nothing but an empty folder may be, and fsync all of it.

    Raises:
        AlmaError: something was put there meanwhile.
    """
    synchronise_tree(work)
    try:
        os.rename(work, os.path.realpath(out))
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise AlmaError(f"{flag}{out}: something was put there meanwhile; give the name of a new folder") from error
    synchronise_alone(Path(os.path.realpath(out)).parent)


@contextlib.contextmanager
def new_folder(path: Path, flag: str, program: str) -> Iterator[Path]:
    """Yield a folder to write into that takes its place when the block ends, and leaves no trace if it raises.

    Args:
        path: the folder; nothing may be there but an empty folder.
        flag: that names it, with a space behind it, for messages.
        program: name of the command that writes it.

    Raises:
        AlmaError: something is in its place, or another process writes it.
    """
    refuse_occupied(path, flag)
    with work_folder(path, program) as work:
        yield work
        publish(work, path, flag)


@contextlib.contextmanager
def locked(path: Path, what: str, shared: bool = False, who: str = "alma-stream") -> Iterator[int]:
    """Hold the lock of a run, or of a part of it.

    Args:
        path: the lock's file, in which its holder signs; its folder is made.
        what: is locked, for messages.
        shared: other holders of this kind may hold it too.
        who: holds it, for messages.

    Yields:
        A file descriptor. A child process that inherits it keeps the lock as long as it lives.

    Raises:
        AlmaError: another process holds it; the children of one that was killed are waited for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(path) as descriptor:
        _lock(descriptor, what, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, who)
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield descriptor


def open_lock(path: Path) -> contextlib.AbstractContextManager[int]:
    """Yield the descriptor of a file to lock, which is made."""
    return _opened(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, what: str, kind: int, who: str) -> None:
    """Take a lock; wait for the children of a killed process to end, but for no living one."""
    deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = ""
            with contextlib.suppress(OSError):  # a folder has no content
                owner = os.pread(descriptor, 1000, 0).decode(errors="replace")
            if not _has_ended(owner) or time.monotonic() > deadline:
                holder = f" (process {owner})" if owner else ""
                raise AlmaError(f"{what}: another {who}{holder} is working on it; wait until it ends") from None
            time.sleep(0.1)


def _has_ended(owner: str) -> bool:
    """Return whether the process that signed a lock is known to have ended; one on another host is not."""
    number, _, host = owner.partition(" on ")
    if host != socket.gethostname() or not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def write_json_atomically(path: Path, content: Mapping[str, Any], durable: bool = True) -> None:
    """Write a JSON file, see `open_atomically`."""
    with open_atomically(path, "w", durable) as file:
        json.dump(content, file, indent=2)
        file.write("\n")


def read_json_object(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object, or raise AlmaError that ends with ``remedy``.

    Python's parser also takes the ``NaN`` and ``Infinity`` that a model which diverged has left in a record.
    """
    with open(path, "rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise AlmaError(f"{path}: damaged, more than {LARGEST >> 20} MiB found; {remedy}")
    try:
        parsed = json.loads(content.decode())
        if b"\\u" in content:
            json.dumps(parsed, ensure_ascii=False).encode()  # half a surrogate pair is no text, and cannot be shown
    except (RecursionError, ValueError) as error:
        raise AlmaError(f"{path}: damaged, not JSON that can be read ({error}); {remedy}") from error
    if not isinstance(parsed, dict):
        raise AlmaError(f"{path}: damaged, a {type(parsed).__name__} found where a JSON object is needed; {remedy}")
    return parsed


def require_version(version: Any, known: int, path: Path, remedy: str) -> None:
    """Raise AlmaError if a record has another format version than the one that is known here."""
    if version != known:
        raise AlmaError(
            f"{path}: format version {version!s:.60} found, this version of fairseq_alma reads {known}; {remedy}"
        )


def as_record(content: Mapping[str, Any], kind: type[Record], path: Path, remedy: str) -> Record:
    """Return a JSON object as the record that its type declares; keys that the type does not have are left out.

    Args:
        content: what `read_json_object` returns.
        kind: a ``msgspec.Struct`` or a dataclass.
        path: where it was read, for messages.
        remedy: what to do if it is no such record.

    Raises:
        AlmaError: a key is missing, or a value of another type or range; says where in the record.
    """
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise AlmaError(f"{path}: damaged, {_fault(str(error), content)}; {remedy}") from error


def _fault(fault: str, content: Any) -> str:
    """Describe a fault of a record: the place, the value found there and the value needed."""
    message, _, where = fault.partition(" - at `")
    where = where.rstrip("`") or "$"
    if missing := re.fullmatch("Object missing required field `(.*)`", message):
        return f"no {missing[1]} in {'it' if where == '$' else where}"
    needed = re.fullmatch("Expected (.+?)(?:, got .*)?", message)
    if needed is None:
        return f"{where}: {message}"
    for key in re.findall(r"\.(\w+)|\[(\d+)\]|(\[\.\.\.\])", where):
        try:
            content = content[key[0]] if key[0] else content[int(key[1])]
        except (LookupError, TypeError, ValueError):
            content = "something else"
    shown = f"a {type(content).__name__} of {len(content)}" if isinstance(content, (list, dict)) else f"{content!r:.60}"
    return f"{where} is {shown}, {needed[1].replace('`', '')} is needed"


FileIdentity = tuple[int, ...]


def file_identity(path: Path) -> Optional[FileIdentity]:
    """Return what distinguishes a file from another one in its place, and from itself once changed; None: no file."""
    try:
        file = path.stat()
    except OSError:
        return None
    return file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns


def once_per_file(read: Callable[[Path], Result]) -> Callable[[Path], Result]:
    """Let a function that reads a file and returns what cannot change remember it as long as the file is the same."""
    known: dict[Path, tuple[FileIdentity, Result]] = {}

    @functools.wraps(read)
    def read_once(path: Path) -> Result:
        identity = file_identity(path)
        if identity is None or known.get(path, (None,))[0] != identity:
            result = read(path)
            if identity is None or identity != file_identity(path) or time.time() - path.stat().st_ctime < _SETTLED:
                return result
            known[path] = identity, result
        return known[path][1]

    return read_once
