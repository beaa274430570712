"""Find the stream at ``--out``, and publish a new stream or additions to it atomically."""

import os
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

from fairseq_alma.data.stream import MANIFEST, Stream, write_manifest
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import publish, synchronise_tree


def publish_stream(built: Path, stream: Stream) -> None:
    """Write the manifest of a new stream and rename folder ``built`` to ``stream.root``."""
    write_manifest(stream, built / MANIFEST)
    publish(built, stream.root)


def publish_additions(built: Path, stream: Stream) -> None:
    """Move the files in folder ``built`` to the stream at ``stream.root``, then write its new manifest.

    A file that the manifest does not list is no part of the stream, so the files of a killed command are overwritten.

    Raises:
        AlmaError: a file or a directory in the stream is a symbolic link.
    """
    synchronise_tree(built)
    files = sorted(path.relative_to(built) for path in built.rglob("*") if path.is_file())
    for part in (part for file in files for part in (file, *file.parents)):
        if part.name and (stream.root / part).is_symlink():
            raise AlmaError(
                f"--out {stream.root}: {part} in it is a symbolic link; remove the link and run the command again"
            )
    for file in files:
        (stream.root / file).parent.mkdir(exist_ok=True)
        os.replace(built / file, stream.root / file)
    synchronise_tree(stream.root)
    write_manifest(stream, stream.root / MANIFEST)


def stream_at(out: Path, kind: str) -> Optional[Stream]:
    """Return the stream of this kind at ``--out``, or None if the folder does not exist or is empty.

    Raises:
        AlmaError: ``--out`` is a stream of another kind, another folder or a mount point.
    """
    if (out / MANIFEST).exists():
        there = Stream.open(out)
        if there.kind != kind:
            raise AlmaError(f"--out {out}: a stream of {there.kind} is there; choose another folder")
        return there
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise AlmaError(f"--out {out}: exists and is not a stream; choose another folder, or remove this one")
    if os.path.ismount(out):
        raise AlmaError(f"--out {out}: the mount point of a file system; choose a folder in it")
    return None


def refuse_other_command(out: Path, history: Sequence[Mapping[str, Any]], now: Mapping[str, Any], advice: str) -> None:
    """Raise AlmaError, with advice, unless the command ``now`` equals the command that made the stream at ``out``.

    A record of a command has ``options`` (flag -> value) and ``inputs`` (records with ``name`` and digest).
    """
    if not history:
        raise AlmaError(f"--out {out}: the stream there does not record the command that made it; {advice}")
    before = history[0]
    for flag in {**before["options"], **now["options"]}:
        old, new = before["options"].get(flag), now["options"].get(flag)
        if old != new:
            old, new = ("its default" if value is None else value for value in (old, new))
            raise AlmaError(f"--out {out}: the stream there was made with {flag} {old}, not {new}; {advice}")
    if before["inputs"] != now["inputs"]:
        changed = [str(new["name"]) for new in now["inputs"] if new not in before["inputs"]]
        which = f"{', '.join(changed[:3])} changed or is new" if changed else "files are missing or moved"
        raise AlmaError(f"--out {out}: the stream there was made from other input: {which}; {advice}")


def recorded_name(path: Path) -> str:
    """Return the name of a file for a manifest: bytes that are not UTF-8 become ``\\xff``."""
    return os.fsencode(path.name).decode("utf-8", "backslashreplace")
