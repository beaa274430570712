"""Write a file that is there whole or not at all, also after a kill, a full disk or a crash of the machine.

The one place where this package puts a file in place of another. What is being written stands beside it under a name
that nobody can guess, ``.NAME.RANDOM.tmp``, and under a lock that ends with its writer: so what a killed command left
is told from what another command is writing just now, and is removed by whoever writes the same file next, or by
`sweep`. No torch here.
"""

import contextlib
import errno
import fcntl
import io
import os
import re
import secrets
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Callable, Iterator, Optional, Sequence

from fairseq_alma.errors import AlmaError

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp", re.DOTALL)
MOST_TOGETHER = 16  # files
_LONGEST_NAME = 200  # bytes of it that are repeated in the temporary name: file systems allow 255
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextlib.contextmanager
def open_atomically(path: Path, mode: str = "wb", durable: bool = True) -> Iterator[IO]:
    """Open a new file for writing that takes its place when the block ends, and leaves no trace if it raises.

    Folders on the way are made.

    Args:
        path: the file; one that is there is replaced, never written into.
        mode: ``wb``, or ``w`` for text in UTF-8.
        durable: wait until file and folder are on the disk. If not, a crash of the machine, but nothing else, may lose
            or tear the file.

    Raises:
        AlmaError: something else than a regular file is in its place, a symbolic link for one.
        OSError: it cannot be written; always with the file's name, also where a library had made another error of it,
            as torch does of a full disk.
    """
    refuse_irregular(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, _FOLDER)
    except OSError as error:
        raise _named(error, path) from error
    try:
        sweep(path.parent, path.name)
        with _temporary(folder, path) as (temporary, raw):
            with _buffered(raw, mode) as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(raw.fileno())
                os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            if durable:
                os.fsync(folder)
    finally:
        os.close(folder)


def write_together(writes: Sequence[Callable[[], None]]) -> None:
    """Call functions that write a file each, at the same time: a disk takes several files in little more time than one.

    Raises:
        Exception: what the first of them raises that does, once all of them have ended.
    """
    if len(writes) == 1:
        writes[0]()
        return
    with ThreadPoolExecutor(max_workers=MOST_TOGETHER) as pool:
        results = [pool.submit(write) for write in writes]
    for result in results:
        result.result()


def refuse_irregular(path: Path, flag: str = "") -> None:
    """Raise AlmaError unless a file may be written at this path: only a regular file is ever replaced.

    Args:
        path: the file.
        flag: that names it, with a space behind it, for the message.
    """
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISREG(mode):
        found = "a symbolic link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise AlmaError(
            f"{flag}{path}: {found}, which is not replaced; give the name of a file that is not there yet, or of a "
            "regular file"
        )


def sweep(folder: Path, name: Optional[str] = None) -> None:
    """Remove the temporary files of writers that were killed; those of living ones stay.

    Args:
        folder: where to look, not in its subfolders; it need not exist.
        name: of the file that was being written; None: any.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            found = _TEMPORARY.fullmatch(entry.name)
            if found and (name is None or found["name"] == _shortened(name)) and entry.is_file(follow_symlinks=False):
                _remove_if_abandoned(entry.path)


def synchronise(path: Path) -> None:
    """Have a file that another program has written, and its name, on the disk."""
    for each in (path, path.parent):
        synchronise_alone(each)


def synchronise_alone(path: Path) -> None:
    """Have a file, or the entries of a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise _named(error, path) from error
    finally:
        os.close(descriptor)


class _RecordingFile(io.FileIO):
    """A file that remembers why it could not be written: torch says only that it could not."""

    failure: Optional[OSError] = None

    def write(self, content) -> int:
        try:
            return super().write(content)
        except OSError as error:
            self.failure = error
            raise


@contextlib.contextmanager
def _temporary(folder: int, path: Path) -> Iterator[tuple[str, _RecordingFile]]:
    """Make the temporary file; on any exception it goes, and an error of the disk gets the name of ``path``."""
    temporary, raw = "", None
    try:
        temporary, raw = _open_locked(folder, path)
        yield temporary, raw
    except BaseException as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
        cause = raw.failure if raw is not None and isinstance(error, RuntimeError) else error
        if isinstance(cause, OSError) and (not temporary or cause.filename in (None, temporary) or cause is not error):
            raise _named(cause, path) from error
        raise


def _open_locked(folder: int, path: Path) -> tuple[str, _RecordingFile]:
    """Return the temporary file and its name; the lock on it lasts as long as it is open."""
    while True:
        temporary = f".{_shortened(path.name)}.{secrets.token_hex(8)}.tmp"
        raw = _RecordingFile(os.open(temporary, _NEW, 0o666, dir_fd=folder), "r+b")
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(raw, fcntl.LOCK_EX)
        if os.fstat(raw.fileno()).st_nlink:  # else somebody swept it in the moment before the lock
            return temporary, raw
        raw.close()


def _shortened(name: str) -> str:
    return os.fsdecode(os.fsencode(name)[:_LONGEST_NAME])


@contextlib.contextmanager
def _buffered(raw: _RecordingFile, mode: str) -> Iterator[IO]:
    """Put a buffer before a file, and an encoder if the mode asks for it; both are closed in any case."""
    binary = io.BufferedWriter(raw)
    file: IO = binary if mode == "wb" else io.TextIOWrapper(binary, encoding="utf-8")
    try:
        yield file
    except BaseException:
        with contextlib.suppress(OSError, ValueError):  # of what it could not write already
            file.close()
        raise
    file.close()


def _remove_if_abandoned(path: str) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(descriptor)


def _named(error: OSError, path: Path) -> OSError:
    """Return the same fault as one of this file."""
    return OSError(error.errno or errno.EIO, error.strerror or str(error), str(path))
