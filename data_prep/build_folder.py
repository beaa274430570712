"""What stands at ``--out``: an earlier command's stream, or the place for a new one, which appears all or nothing."""

import os
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional, Sequence

from fairseq_alma.data.stream import MANIFEST, Stream, write_manifest
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import WorkFolder, synchronise_tree


class BuildFolder(WorkFolder):
    """The work folder of a stream.

    Args:
        out: where the stream will be.
        program: name of the command that builds.
    """

    def __init__(self, out: Path, program: str) -> None:
        super().__init__(out, "--out ", program)

    def publish_stream(self, stream: Stream) -> None:
        """Write the manifest and move the whole folder to its place."""
        write_manifest(stream, self.path / MANIFEST)
        self.publish()

    def publish_additions(self, stream: Stream) -> None:
        """Move every entry of the folder into the existing stream, and write its new manifest last.

        What is not in the manifest does not belong to the stream: left-overs of a killed run give way.
        """
        synchronise_tree(self.path)
        files = sorted(path.relative_to(self.path) for path in self.path.rglob("*") if path.is_file())
        self.refuse_links(files)
        for file in files:
            (self.out / file).parent.mkdir(exist_ok=True)
            os.replace(self.path / file, self.out / file)
        synchronise_tree(self.out)
        write_manifest(stream, self.out / MANIFEST)

    def refuse_links(self, paths: Iterable[Path]) -> None:
        """Raise AlmaError if a path in the stream is a symbolic link or leads through one."""
        for path in paths:
            for part in (path, *path.parents):
                if part.name and (self.out / part).is_symlink():
                    raise AlmaError(
                        f"--out {self.given}: {part} in it is a symbolic link, which is not written through; remove it"
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
