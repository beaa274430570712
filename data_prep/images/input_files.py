"""Find the published files under ``--source`` and record what was read, by content."""

from pathlib import Path
from typing import Any, Optional, Sequence

from data_prep.build_folder import recorded_name
from fairseq_alma.data.manifest import file_sha256
from fairseq_alma.errors import AlmaError


class InputFiles:
    """The files that one command reads.

    Attributes:
        records: name, size in bytes and sha256 of each file that was asked for, as the manifest records them.
    """

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def add(self, path: Path, flag: str) -> Path:
        """Record a file that a flag names and return it.

        Raises:
            AlmaError: it is not there.
        """
        if not path.is_file():
            found = "a folder" if path.is_dir() else "no regular file" if path.exists() else "no such file"
            raise AlmaError(f"{flag} {path}: {found}; give a file")
        self.records.append({"name": recorded_name(path), "size": path.stat().st_size, "sha256": file_sha256(path)})
        return path

    def find(self, source: Path, names: Sequence[str], folders: Sequence[str] = ()) -> list[Path]:
        """Record files of a folder and return their paths, in the order of the names.

        Args:
            source: the folder that ``--source`` names.
            names: of files that are all needed; each may also end in ``.gz``.
            folders: where archives put these files; looked into too.

        Raises:
            AlmaError: one is not there.
        """
        paths = []
        for name in names:
            path = _look_for(source, name, folders)
            if path is None:
                raise AlmaError(f"--source {source}: no {name} in it (nor {name}.gz); {advice(names, folders)}")
            paths.append(self.add(path, "--source"))
        return paths


def holds(source: Path, name: str, folders: Sequence[str]) -> bool:
    """Tell whether ``--source`` has a file of this name, see `InputFiles.find`.

    Raises:
        AlmaError: ``--source`` is no folder.
    """
    return _look_for(source, name, folders) is not None


def advice(names: Sequence[str], folders: Sequence[str]) -> str:
    """Say which files a folder must hold."""
    within = f", or that holds {folders[0]}/ with them" if folders else ""
    return f"give the folder that holds {', '.join(names)}{within}"


def _look_for(source: Path, name: str, folders: Sequence[str]) -> Optional[Path]:
    if not source.is_dir():
        found = "a file" if source.exists() else "no such folder"
        raise AlmaError(f"--source {source}: {found}; give the folder that holds the published files")
    for folder in (source, *(source / folder for folder in folders)):
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    return None
