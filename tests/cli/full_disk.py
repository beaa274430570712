"""A disk that is full when a certain file is written."""

import errno
import io
import os

import pytest

from fairseq_alma import files


def fill_disk(monkeypatch: pytest.MonkeyPatch, name: str, num_bytes: int) -> None:
    """Let files of a name take so many bytes and then none, as the system says it wherever a library writes."""
    taken: dict[str, int] = {}

    def write(self: files._RecordingFile, content) -> int:
        temporary = os.path.basename(os.readlink(f"/proc/self/fd/{self.fileno()}"))
        taken[temporary] = taken.get(temporary, 0) + len(content)
        if temporary.startswith(f".{name}.") and taken[temporary] > num_bytes:
            self.failure = OSError(errno.ENOSPC, "No space left on device")
            raise self.failure
        return io.FileIO.write(self, content)

    monkeypatch.setattr(files._RecordingFile, "write", write)
