"""Write a folder that is there whole or not at all, also after a kill, a full disk or a crash of the machine.

`atomic_file` does so for one file. What is being written stands beside the folder's place as ``.NAME.RANDOM.part``,
under a lock that ends with its writer; what a killed command left is removed by whoever writes the same folder next.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterator

from fairseq_alma.atomic_file import synchronise, synchronise_alone
from fairseq_alma.errors import AlmaError

_SYNCED_AT_ONCE = 16
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def new_folder(path: Path, flag: str) -> Iterator[Path]:
    """Yield a folder to write into that takes its place when the block ends, and leaves no trace if it raises.

    Args:
        path: the folder; nothing may stand there but an empty folder.
        flag: that names it, with a space behind it, for messages.

    Raises:
        AlmaError: something stands in its place.
    """
    refuse_occupied(path, flag)
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    part = path.parent / f".{path.name}.{secrets.token_hex(8)}.part"
    part.mkdir()
    descriptor = os.open(part, _FOLDER)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield part
        synchronise_tree(part)
        _put_in_place(part, path, flag)
        synchronise(path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def synchronise_tree(root: Path) -> None:
    """Have all files and folders on the disk; many at once, as the disk then writes its journal less often."""
    paths = [root, *(path for path in root.rglob("*") if not path.is_symlink())]
    with ThreadPoolExecutor(_SYNCED_AT_ONCE) as pool:
        list(pool.map(synchronise_alone, paths))


def refuse_occupied(path: Path, flag: str) -> None:
    """Raise AlmaError if something else than an empty folder stands where a folder is to be made."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise AlmaError(f"{flag}{path}: a file or a link stands there; give the name of a new folder")
    if path.is_dir() and any(path.iterdir()):
        raise AlmaError(f"{flag}{path}: exists and is not empty; give the name of a new folder, or remove this one")


def _put_in_place(part: Path, path: Path, flag: str) -> None:
    try:
        os.rename(part, path)  # over an empty folder at most
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise AlmaError(f"{flag}{path}: something was put there meanwhile; give the name of a new folder") from error


def _sweep(path: Path) -> None:
    """Remove what killed writers of this folder left; what a living one holds the lock of stays."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.part")
    for entry in [each for each in path.parent.iterdir() if pattern.fullmatch(each.name)]:
        with contextlib.suppress(OSError):
            descriptor = os.open(entry, _FOLDER)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry)
            finally:
                os.close(descriptor)
