"""Kill a process directly before its n-th file operation below a folder, as SIGKILL or a power failure would.

Operations of this process and its forks count: opening a file for writing, renaming, removing, creating and removing a
folder, and fsync. A copy counts twice: before it, and halfway through. Locks do not count.
"""

import mmap
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple, Optional

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
TEMPORARY = re.compile(r"\..+\.tmp")  # `files` opens them relative to a folder's descriptor
HOW = {
    "kill": "SIGKILL for alma-stream and the command of the stage",
    "power": "a power failure, which also cuts each file without fsync in half",
}
KEPT = (".pt", ".json", ".npz")  # files that a power failure may cut; logs do not matter
_PATHS = {  # audit event -> for each path argument, its position and the position of its folder's descriptor
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((0, 2), (1, 3)),
    "os.remove": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.rmdir": ((0, 1),),
    "shutil.copyfile": ((0, None), (1, None)),
}


class Operation(NamedTuple):
    """A file operation: its name, and the path that it creates, changes or removes."""

    name: str
    path: str


class Crash:
    """A crash of a run, and a journal of its operations.

    Args:
        root: folder whose operations count.
        journal: file with one line per operation.
        step: number of the first operation that does not happen, from 1; 0: no crash.
        how: a key of `HOW`.
        only: regular expression for the paths whose operations count.
    """

    def __init__(self, root: Path, journal: Path, step: int = 0, how: str = "kill", only: str = "") -> None:
        self.root, self.journal, self.step, self.how, self.only = str(root), journal, step, how, re.compile(only)
        self.count = mmap.mmap(-1, 8)  # shared with forked processes
        self.main = 0
        self.is_busy = False

    def arm(self) -> None:
        """Start to watch this process and its forks."""
        self.main = os.getpid()
        self.lines = os.open(self.journal, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        sys.addaudithook(self._watch)
        fsync = os.fsync

        def fsync_counted(file: Any) -> None:
            number = file if isinstance(file, int) else file.fileno()
            self._operation("fsync", os.readlink(f"/proc/self/fd/{number}"))
            fsync(file)

        os.fsync = fsync_counted  # fsync has no audit event

    def operations(self) -> list[Operation]:
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        return [Operation(*line.split("\t", 1)) for line in lines]

    def _watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_busy:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, (str, bytes)) and flags & WRITING:
                self._operation("open", os.fsdecode(path))
        elif event in _PATHS:
            paths = [_resolved(arguments[at], arguments[folder] if folder else -1) for at, folder in _PATHS[event]]
            if event == "shutil.copyfile":
                self._operation("copy", paths[1])
                self._operation("half a copy", paths[1], copied=paths[0])
            else:
                self._operation(event.removeprefix("os."), "\t".join(reversed(paths)))

    def _operation(self, name: str, path: str, copied: Optional[str] = None) -> None:
        """Count an operation of the run, and crash before the operation number ``step``."""
        temporary = not os.path.isabs(path) and TEMPORARY.fullmatch(path)
        if ".lock" in path or not (temporary or f"{path}/".startswith(f"{self.root}/")) or not self.only.search(path):
            return
        number = int.from_bytes(self.count[:8], "little") + 1
        self.count[:8] = number.to_bytes(8, "little")
        os.write(self.lines, f"{name}\t{path}\n".encode())
        if number == self.step:
            self.is_busy = True
            if copied is not None:
                shutil.copyfile(copied, path)
                os.truncate(path, os.path.getsize(path) // 2)
            if self.how == "power":
                self._cut()
            os.kill(self.main, signal.SIGKILL)
            os._exit(137)

    def _cut(self) -> None:
        """Cut each file that was written without fsync in half; the last operation in the journal did not happen."""
        unsafe: set[str] = set()
        for name, path in self.operations()[:-1]:
            first, _, source = path.partition("\t")
            if name in ("open", "half a copy"):
                unsafe.add(first if os.path.isabs(first) else os.path.basename(first))
            elif name == "fsync":
                unsafe -= {first, os.path.basename(first)}
            elif name in ("rename", "link"):
                if unsafe & {source, os.path.basename(source)}:
                    unsafe.add(first)
                unsafe |= {f"{first}{each[len(source) :]}" for each in unsafe if each.startswith(f"{source}/")}
        for path in unsafe:
            if os.path.isabs(path) and path.endswith(KEPT) and os.path.isfile(path):
                os.truncate(path, os.path.getsize(path) // 2)


def _resolved(path: Any, folder: int) -> str:
    """Return the absolute path of a path relative to the folder of a descriptor."""
    start = os.getcwd() if folder in (-1, None) else os.readlink(f"/proc/self/fd/{folder}")
    return os.path.join(start, os.fsdecode(path))
