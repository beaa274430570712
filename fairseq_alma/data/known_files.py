"""Files that were read once and need not be read again while they are the same: by inode, size and times.

A run has hundreds of stages, each of which would look at the same checkpoints and take the same checksums again. What
was verified is also handed from the processes of a run to those that follow them (`text.fork_server`).
"""

import functools
import time
from pathlib import Path
from typing import Callable, Iterable, Optional, TypeVar

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
