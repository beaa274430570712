"""What stands at ``--out``: a stream of an earlier command, or the place for a new one, which appears all or nothing.

A stream is built beside its place and moved there when it is complete.

The build folder is hidden and has a fixed name, so what a killed run left is found and cleared by the next one. The
lock on it ends with the process that holds it, however that ends. Nothing is written or removed through symbolic links.
"""

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional, Sequence

from fairseq_alma.data.manifest import MANIFEST
from fairseq_alma.data.stream import Stream, write_manifest
from fairseq_alma.errors import AlmaError, refuse_unwritable
from fairseq_alma.files import synchronise_alone, synchronise_tree

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class BuildFolder:
    """A folder to build in, next to ``out``, that this process alone uses; removed at the end.

    Args:
        out: where the stream will be; a symbolic link stands for what it points to.
        program: name of the command that builds.

    Raises:
        AlmaError: another process builds the same stream, or what stands there is not this user's folder.
    """

    def __init__(self, out: Path, program: str) -> None:
        self._given = out
        self._program = program
        self._out = Path(os.path.realpath(out))
        self.path = self._out.parent / f".{self._out.name}.building"

    def __enter__(self) -> "BuildFolder":
        if os.path.ismount(self._out):
            raise AlmaError(f"--out {self._given}: a file system is mounted there; choose a folder in it")
        refuse_unwritable(self._given, "--out")
        while not self._take():
            pass  # another process was at its end: the folder that it held is gone
        for entry in self.path.iterdir():  # what a run that was killed left here
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if self._is_held():
                shutil.rmtree(self.path)
        finally:
            os.close(self._descriptor)

    def _take(self) -> bool:
        """Make the folder and lock it; False if another process has removed it meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        made = True
        try:
            self.path.mkdir()
        except FileExistsError:
            made = False
        try:
            self._descriptor = os.open(self.path, _FOLDER)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            raise AlmaError(f"{self.path}: no folder; {self._program} builds there, so give it another name") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = self._is_held()
            if held and not made and os.fstat(self._descriptor).st_uid != os.geteuid():
                raise AlmaError(f"{self.path}: another user's folder; choose another --out")
        except BaseException as error:
            os.close(self._descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            raise AlmaError(
                f"{self._given}: another {self._program} is at work on it ({self.path}); wait for its end, or choose "
                "another --out"
            ) from error
        if not held:
            os.close(self._descriptor)
        return held

    def _is_held(self) -> bool:
        """Tell whether the folder is still the one that is locked, neither published nor another process's."""
        try:
            return os.path.samestat(self.path.lstat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def publish(self, stream: Stream) -> None:
        """Write the manifest and move the whole folder to its place."""
        write_manifest(stream, self.path / MANIFEST)
        synchronise_tree(self.path)
        os.rename(self.path, self._out)  # over an empty folder at most; `stream_at` has refused any other
        synchronise_alone(self._out.parent)

    def publish_additions(self, stream: Stream) -> None:
        """Move every entry of the folder into the existing stream, and write its new manifest last.

        What is not in the manifest does not belong to the stream: left-overs of a killed run give way.
        """
        synchronise_tree(self.path)
        files = sorted(path.relative_to(self.path) for path in self.path.rglob("*") if path.is_file())
        self.refuse_links(files)
        for file in files:
            (self._out / file).parent.mkdir(exist_ok=True)
            os.replace(self.path / file, self._out / file)
        synchronise_tree(self._out)
        write_manifest(stream, self._out / MANIFEST)

    def refuse_links(self, paths: Iterable[Path]) -> None:
        """Raise AlmaError if a path in the stream is a symbolic link or leads through one."""
        for path in paths:
            for part in (path, *path.parents):
                if part.name and (self._out / part).is_symlink():
                    raise AlmaError(
                        f"--out {self._given}: {part} in it is a symbolic link, which is not written through; remove it"
                    )


def stream_at(out: Path, kind: str) -> Optional[Stream]:
    """Return the stream that ``--out`` holds, or None where there is nothing or an empty folder.

    Args:
        out: the folder.
        kind: ``text`` or ``images``.

    Raises:
        AlmaError: something else is there.
    """
    if (out / MANIFEST).exists():
        there = Stream.open(out)
        if there.kind != kind:
            raise AlmaError(f"--out {out}: a stream of {there.kind} is there; choose another folder")
        return there
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise AlmaError(f"--out {out}: exists and is no stream; choose another folder, or remove what is there")
    return None


def refuse_other_command(out: Path, history: Sequence[Mapping[str, Any]], now: Mapping[str, Any], advice: str) -> None:
    """Raise AlmaError unless the command that made a stream is the one that is given now.

    Args:
        out: the stream's folder.
        history: what the manifest records of commands, the one that made it first: ``options`` by their flags, and
            ``inputs``, each with ``name`` and digest.
        now: the same of the command that is given now.
        advice: what to do if they differ.
    """
    if not history:
        raise AlmaError(f"--out {out}: the stream there does not say which command made it; {advice}")
    before = history[0]
    for flag in {**before["options"], **now["options"]}:
        old, new = (entry["options"].get(flag) for entry in (before, now))
        if old != new:
            raise AlmaError(
                f"--out {out}: the stream there was made with {flag} {_shown(old)}, not {_shown(new)}; {advice}"
            )
    if before["inputs"] != now["inputs"]:
        changed = [str(new["name"]) for new in now["inputs"] if new not in before["inputs"]]
        which = f"{', '.join(changed[:3])} is not what it was made from" if changed else "files are missing or moved"
        raise AlmaError(f"--out {out}: the stream there was made from other input: {which}; {advice}")


def _shown(value: object) -> str:
    return "left to its default" if value is None else str(value)


def recorded_name(path: Path) -> str:
    """Return a file's name as a manifest can hold it: bytes that are not UTF-8 become ``\\xff``."""
    return os.fsencode(path.name).decode("utf-8", "backslashreplace")
