"""Files and folders that are there whole or not at all, also after a kill, a full disk or a crash of the machine.

The one place where this package puts a file in place of another. What is being written stands beside it under a name
that nobody can guess, ``.NAME.RANDOM.tmp``, or for a folder in ``.NAME.building``, which carries a marker, and under a
lock that ends with its writer: so what a killed command left is told from what another command is writing just now and
from what is the user's own, and is removed by whoever writes the same next, or by `sweep`.

Records are small JSON files that are held against a declared type where they are read (``data/stream.py``,
``runs/records.py``) whose ranges msgspec checks. It does not parse them: Python's parser also takes the ``NaN`` and
``Infinity`` that a model which diverged has left in a record. No torch here.

Files that were read once need not be read again while they are the same, by inode, size and times (`VERIFIED`,
`once_per_file`). A run has hundreds of stages, each of which would look at the same checkpoints and take the same
checksums again. What was verified is also handed from the processes of a run to those that follow them
(`text.fork_server`).
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import io
import json
import os
import re
import secrets
import shutil
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Annotated, Any, Callable, Iterable, Iterator, Mapping, Optional, Self, Sequence, TypeVar, Union

import msgspec
from msgspec import Meta

from fairseq_alma.errors import AlmaError, refuse_irregular, refuse_unwritable

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp", re.DOTALL)
MOST_TOGETHER = 16  # files
_LONGEST_NAME = 200  # bytes of it that are repeated in the temporary name: file systems allow 255
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OWN_FOLDER = _FOLDER | os.O_NOFOLLOW
_HERE, _RENAME_EXCHANGE = -100, 2  # AT_FDCWD of fcntl.h, and a flag of Linux's stdio.h
WORK_MARKER = ".made-by-fairseq_alma"
LOCK_PATIENCE_SECONDS = 30.0

LARGEST = 1 << 28  # bytes; a manifest of 10,000 mega-batches from 65,535 files takes a tenth of it
MAX_MEGABATCHES = 10_000

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Amount = Union[Count, Annotated[float, Meta(ge=0, le=1.7e308)]]
"""A finite number of at least 0; whole ones stay whole, as fingerprints are over the spelling."""
Name = Annotated[str, Meta(min_length=1, max_length=1000)]
NumMegabatches = Annotated[int, Meta(ge=1, le=MAX_MEGABATCHES)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]

Record = TypeVar("Record")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@contextlib.contextmanager
def open_atomically(path: Path, mode: str = "wb", durable: bool = True, replace: bool = True) -> Iterator[IO]:
    """Open a new file for writing that takes its place when the block ends, and leaves no trace if it raises.

    Folders on the way are made.

    Args:
        path: the file; one that is there is replaced, never written into.
        mode: ``wb``, or ``w`` for text in UTF-8.
        durable: wait until file and folder are on the disk. If not, a crash of the machine, but nothing else, may lose
            or tear the file.
        replace: False: what another command puts in its place meanwhile stays.

    Raises:
        AlmaError: something else than a regular file is in its place, a symbolic link for one, or it is not replaced.
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
                if replace or not _linked(temporary, path, folder):
                    os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            if durable:
                os.fsync(folder)
    finally:
        os.close(folder)


def _linked(temporary: str, path: Path, folder: int) -> bool:
    """Give a file its name unless another has it; return False where a file system cannot tell."""
    try:
        os.link(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except FileExistsError as error:
        raise _existing(path) from error
    except OSError:
        return False
    os.unlink(temporary, dir_fd=folder)
    return True


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


class WorkFolder:
    """A folder to build another one in, beside its place, that one process alone uses; it is gone at the end.

    Its name is fixed, ``.NAME.building``, so what a killed command left is found and cleared by the next one. The lock
    on it ends with the process that holds it, however that ends. It carries a marker, and only what does is ever
    emptied: a folder of this name that somebody else has made is refused. Nothing is followed through symbolic links.

    Args:
        out: what is built; a symbolic link stands for what it points to.
        flag: that names it, with a space behind it, for messages.
        program: name of the command that builds.
        keeps: whether what is in ``kept`` outlives a kill or an interruption, for the next one to go on with.

    Attributes:
        path: where to build.
        kept: beside it, for what is not part of what is built.

    Raises:
        AlmaError: another process builds the same, or what stands there is no folder of this user's commands.
    """

    def __init__(self, out: Path, flag: str, program: str, keeps: bool = False) -> None:
        self.given = out
        self.flag = flag
        self.out = Path(os.path.realpath(out))
        self._program = program
        self._root = self.out.parent / f".{self.out.name}.building"
        self.path = self._root / "content"
        self.kept = self._root / "kept"
        self._keeps = keeps

    def __enter__(self) -> Self:
        if os.path.ismount(self.out):
            raise AlmaError(f"{self.flag}{self.given}: a file system is mounted there; choose a folder in it")
        refuse_unwritable(self.given, self.flag.strip())
        while not self._take():
            pass  # another process was at its end: the folder that it held is gone
        try:
            self._clear(self._keeps)
            (self._root / WORK_MARKER).touch()
            self.path.mkdir()
        except BaseException:
            os.close(self._descriptor)
            raise
        return self

    def __exit__(self, kind: Optional[type] = None, *exception: object) -> None:
        try:
            if self._keeps and kind is not None and not issubclass(kind, Exception) and self.kept.exists():
                self._clear(True)
            else:
                self._remove()
        finally:
            os.close(self._descriptor)

    def sweep(self) -> None:
        """Remove what a command left that was killed when its result stood in its place; what is not ours stays."""
        if self._root.is_dir() and ((self._root / WORK_MARKER).is_file() or not any(self._root.iterdir())):
            with self:
                pass

    def publish(self) -> None:
        """Move what was built to its place, where nothing but an empty folder may stand.

        Raises:
            AlmaError: something was put there meanwhile.
        """
        synchronise_tree(self.path)
        try:
            os.rename(self.path, self.out)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            what = f"{self.flag}{self.given}: something was put there meanwhile"
            raise AlmaError(f"{what}; give the name of a new folder") from error
        synchronise(self.out)
        self._remove()  # now: the next command may begin

    def _remove(self) -> None:
        if _is_at(self._root, self._descriptor):
            self._clear()
            self._root.rmdir()

    def _take(self) -> bool:
        """Make the folder and lock it; False if another process has removed it meanwhile."""
        self._root.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self._root.mkdir()
        try:
            self._descriptor = os.open(self._root, _OWN_FOLDER)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            what = f"{self._root}: no folder; {self._program} builds there"
            raise AlmaError(f"{what}, so give it another name") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = _is_at(self._root, self._descriptor)
            if held:
                self._refuse_foreign()
        except BaseException as error:
            os.close(self._descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            raise AlmaError(
                f"{self.given}: another {self._program} is at work on it ({self._root}); wait for its end, or choose "
                f"another {self.flag}".rstrip()
            ) from error
        if not held:
            os.close(self._descriptor)
        return held

    def _refuse_foreign(self) -> None:
        if os.fstat(self._descriptor).st_uid != os.geteuid():
            raise AlmaError(f"{self._root}: another user's folder; choose another {self.flag}".rstrip())
        if not (self._root / WORK_MARKER).is_file() and any(self._root.iterdir()):
            raise AlmaError(
                f"{self._root}: a folder that {self._program} has not made (no {WORK_MARKER} in it), and it builds "
                "there; give it another name"
            )

    def _clear(self, keeps: bool = False) -> None:
        """Empty the folder, the marker last: a kill meanwhile leaves one that is known, or empty."""
        spared = (WORK_MARKER, self.kept.name) if keeps else ()
        for entry in sorted(self._root.iterdir(), key=lambda entry: entry.name == WORK_MARKER):
            if entry.name in spared:
                continue
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def refuse_existing(out: Path, force: bool) -> None:
    """Raise AlmaError if the file that ``--out`` names may not be written.

    Args:
        out: the file. What a writer left beside it that was killed between its last steps goes.
        force: whether ``--force`` allows to replace it.
    """
    if out.is_dir():
        raise AlmaError(f"--out {out}: a folder; give the name of a file in it")
    refuse_irregular(out, "--out ")
    if out.exists() and not force:
        sweep(out.parent, out.name)
        raise _existing(out)
    refuse_unwritable(out, "--out")


def _existing(out: Path) -> AlmaError:
    return AlmaError(f"--out {out}: exists already; give another name, or --force to replace it")


def refuse_occupied(path: Path, flag: str) -> None:
    """Raise AlmaError if something else than an empty folder stands where a folder is to be made.

    What a writer left beside it that was killed between its last steps goes, as nobody will write there again.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise AlmaError(f"{flag}{path}: a file or a link stands there; give the name of a new folder")
    if path.is_dir() and any(path.iterdir()):
        work = WorkFolder(path, flag, "")
        if work.path.parent.is_dir():
            with contextlib.suppress(AlmaError, OSError), work:
                pass
        raise AlmaError(f"{flag}{path}: exists and is not empty; give the name of a new folder, or remove this one")


@contextlib.contextmanager
def new_folder(path: Path, flag: str, program: str) -> Iterator[Path]:
    """Yield a folder to write into that takes its place when the block ends, and leaves no trace if it raises.

    Args:
        path: the folder; nothing may stand there but an empty folder.
        flag: that names it, with a space behind it, for messages.
        program: name of the command that writes it.

    Raises:
        AlmaError: something stands in its place, or another process writes it.
    """
    refuse_occupied(path, flag)
    with WorkFolder(path, flag, program) as work:
        yield work.path
        work.publish()


def replace_folder(new: Path, path: Path) -> None:
    """Put a folder in place of another, which goes, beside it in the same folder.

    Linux exchanges their names in one step, so that whoever opens ``path`` finds the one or the other. Where the system
    or the file system cannot, nothing stands there for a moment.
    """
    old = path.with_name(f".{path.name}-old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists() and _exchange(new, path):
        shutil.rmtree(new)
        return
    if path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Give two folders each other's name in one step; return whether that could be done."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    if exchange is None:
        return False
    sys.audit("os.rename", one, other, -1, -1)  # as Python tells of its own calls
    return exchange(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE) == 0


def synchronise_tree(root: Path) -> None:
    """Have all files and folders on the disk; many at once, as the disk then writes its journal less often."""
    paths = [root, *(path for path in root.rglob("*") if not path.is_symlink())]
    with ThreadPoolExecutor(MOST_TOGETHER) as pool:
        list(pool.map(synchronise_alone, paths))


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
        yield descriptor


@contextlib.contextmanager
def open_lock(path: Path) -> Iterator[int]:
    """Yield the descriptor of a file to lock, which is made but never followed where it is a link."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)  # it is written into
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, what: str, kind: int, who: str) -> None:
    """Take a lock and sign it; wait for the children of a killed run to end, but for no living one."""
    deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
    me = f"{os.getpid()} on {socket.gethostname()}"
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, me.encode(), 0)
            return
        except BlockingIOError:
            owner = os.pread(descriptor, 1000, 0).decode(errors="replace")
            if not _has_ended(owner) or time.monotonic() > deadline:
                raise AlmaError(
                    f"{what}: another {who} (process {owner}) is working on it; wait until it ends"
                    + (", or give another --run" if who == "alma-stream" else "")
                ) from None
            time.sleep(0.1)


def _has_ended(owner: str) -> bool:
    """Tell whether the process that signed a lock is known to have ended; one on another host is not."""
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


def _is_at(path: Path, descriptor: int) -> bool:
    """Tell whether a path still names what is open."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def write_json_atomically(path: Path, content: Mapping[str, Any], durable: bool = True) -> None:
    """Write a file that is either there whole or not at all, also after a crash of the machine if it is ``durable``."""
    with open_atomically(path, "w", durable) as file:
        json.dump(content, file, indent=2)
        file.write("\n")


def read_json_object(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object, or raise AlmaError that ends with ``remedy``."""
    with open(path, "rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise AlmaError(f"{path}: damaged, more than {LARGEST >> 20} MiB found; {remedy}")
    try:
        text = content.decode()
        parsed = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(parsed, ensure_ascii=False).encode()  # half a pair is no text, and cannot be shown
    except RecursionError as error:
        raise AlmaError(f"{path}: damaged, not JSON that can be read (nested too deeply); {remedy}") from error
    except ValueError as error:
        raise AlmaError(f"{path}: damaged, not JSON ({error}); {remedy}") from error
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
        raise AlmaError(f"{path}: damaged, {_fault(error, content, kind)}; {remedy}") from error


def _fault(error: msgspec.ValidationError, content: Mapping[str, Any], kind: type) -> str:
    """Say where in a record the fault is, what was found there and what is needed."""
    lacking = [name for name in _required(kind) if name not in content]
    if lacking:
        return f"no {', '.join(lacking)} in it"
    message, _, where = str(error).partition(" - at `")
    where = where.rstrip("`") or "$"
    if missing := re.fullmatch("Object missing required field `(.*)`", message):
        return f"no {missing[1]} in {where}"
    if needed := re.fullmatch("Expected (.+?)(?:, got .*)?", message):
        return f"{where} is {_shown(content, where)}, {needed[1].replace('`', '')} is needed"
    return f"{where}: {message}"


def _required(kind: type) -> list[str]:
    fields = msgspec.inspect.type_info(kind).fields  # type: ignore[attr-defined]
    return [field.encode_name for field in fields if field.required]


def _shown(content: Any, where: str) -> str:
    """Return the value at a place such as ``$.valid.loss`` or ``$.splits[3].name``, cut short."""
    for key in re.findall(r"\.(\w+)|\[(\d+)\]|(\[\.\.\.\])", where):
        try:
            content = content[key[0]] if key[0] else content[int(key[1])]
        except (LookupError, TypeError, ValueError):
            return "something else"
    if isinstance(content, (list, dict)):
        return f"a {type(content).__name__} of {len(content)}"
    text = repr(content) if not isinstance(content, int) or abs(content) < 10**30 else "a huge number"
    return text if len(text) <= 60 else f"{text[:60]}…"


FileIdentity = tuple[int, ...]
Result = TypeVar("Result")
_SETTLED_SECONDS = 0.1  # a file that was changed so recently may change again within one tick of its clock


def file_identity(path: Path) -> Optional[FileIdentity]:
    """Return what tells a file from another one in its place, and from itself once it has changed; None: no file."""
    try:
        file = path.stat()
    except OSError:
        return None
    return file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns


class VerifiedFiles:
    """Files whose content was found to be as it should be."""

    def __init__(self) -> None:
        self._found: dict[tuple[FileIdentity, str], None] = {}  # in order

    def has(self, path: Path, content: str = "") -> bool:
        """Tell whether this very file was verified before; ``content`` is what it was compared with, a sha256."""
        identity = file_identity(path)
        return identity is not None and (identity, content) in self._found

    def add(self, path: Path, content: str = "") -> None:
        """Note that a file is as it should be; the next one who reads it need not look again."""
        identity = file_identity(path)
        if identity is not None and time.time() - path.stat().st_ctime > _SETTLED_SECONDS:
            self._found[identity, content] = None

    def __len__(self) -> int:
        return len(self._found)

    def since(self, number: int) -> list[tuple[FileIdentity, str]]:
        """Return what was noted after so many."""
        return [*self._found][number:]

    def take(self, found: Iterable[tuple[FileIdentity, str]]) -> None:
        """Note what another process has verified."""
        self._found.update(dict.fromkeys(found))


VERIFIED = VerifiedFiles()
"""Those of this process."""


def once_per_file(read: Callable[[Path], Result]) -> Callable[[Path], Result]:
    """Let a function that reads a file and returns what cannot change remember it as long as the file is the same."""
    known: dict[Path, tuple[FileIdentity, Result]] = {}

    @functools.wraps(read)
    def read_once(path: Path) -> Result:
        identity = file_identity(path)
        if identity is None or known.get(path, (None,))[0] != identity:
            result = read(path)
            if identity is None or identity != file_identity(path):
                return result
            known[path] = identity, result
        return known[path][1]

    return read_once
