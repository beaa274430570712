"""Build a stream beside its place and move it there when it is complete: all or nothing.

The build folder is hidden and has a fixed name, so what a killed run left is found and cleared by the next one. The
lock on it ends with the process that holds it, however that ends.
"""

import fcntl
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fairseq_alma.data.file_errors import naming
from fairseq_alma.data.manifest import MANIFEST
from fairseq_alma.data.stream import Stream, write_manifest
from fairseq_alma.errors import AlmaError

_SYNCED_AT_ONCE = 16


class BuildFolder:
    """A folder to build in, next to ``out``, that this process alone uses; removed at the end.

    Args:
        out: where the stream will be.
        program: name of the command that builds.

    Raises:
        AlmaError: another process builds the same stream.
    """

    def __init__(self, out: Path, program: str) -> None:
        self._out = out
        self._program = program
        out = Path(os.path.abspath(out))
        self.path = out.parent / f".{out.name}.building"

    def __enter__(self) -> "BuildFolder":
        self.path.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise AlmaError(
                f"{self._out}: another {self._program} is at work on it ({self.path}); wait for its end, or choose "
                "another --out"
            ) from error
        self._clear()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.path.exists():
            shutil.rmtree(self.path)
        os.close(self._descriptor)

    def _clear(self) -> None:
        """Remove what a run that was killed left here."""
        for entry in self.path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def publish(self, stream: Stream) -> None:
        """Write the manifest and move the whole folder to its place."""
        write_manifest(stream, self.path / MANIFEST)
        _sync_tree(self.path)
        if self._out.is_dir():
            self._out.rmdir()  # an empty one; `stream_at` has refused any other
        os.rename(self.path, self._out)
        _sync(self._out.absolute().parent)

    def publish_additions(self, stream: Stream) -> None:
        """Move every entry of the folder into the existing stream, its new manifest last.

        What is not in the manifest does not belong to the stream: left-overs of a killed run give way.
        """
        _sync_tree(self.path)
        for entry in sorted(path for path in self.path.rglob("*") if path.is_file()):
            target = self._out / entry.relative_to(self.path)
            target.parent.mkdir(exist_ok=True)
            os.replace(entry, target)
        _sync_tree(self._out)
        write_manifest(stream, self.path / MANIFEST)
        os.replace(self.path / MANIFEST, self._out / MANIFEST)
        _sync(self._out)


def _sync_tree(root: Path) -> None:
    """Have all files and folders on the disk; many at once, as the disk then writes its journal less often."""
    paths = [root, *root.rglob("*")]
    with ThreadPoolExecutor(_SYNCED_AT_ONCE) as pool:
        list(pool.map(_sync, paths))


def _sync(path: Path) -> None:
    """Have a file or the entries of a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
