"""Find the stream at ``--out``. Publish a new stream, or an addition to an existing stream, atomically."""

import os
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

from fairseq_alma.data.stream import MANIFEST, Stream, write_manifest
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import publish, synchronise_tree


def publish_stream(built: Path, stream: Stream) -> None:
    """Write the manifest into ``built``, and publish ``built`` as a new stream at ``stream.root``."""
    write_manifest(stream, built / MANIFEST)
    publish(built, stream.root)


def publish_additions(built: Path, stream: Stream) -> None:
    """Move the files in ``built`` into the existing stream at ``stream.root``, and write the manifest last.

    Overwrite files that a killed command moved into the stream. The manifest does not list these files.

    Raises:
        AlmaError: a file or a folder of the existing stream is a symbolic link.
    """
    synchronise_tree(built)
    files = sorted(path.relative_to(built) for path in built.rglob("*") if path.is_file())
    for path in (path for file in files for path in (file, *file.parents)):
        if path.name and (stream.root / path).is_symlink():
            raise AlmaError(
                f"--out {stream.root}: expected a file or a folder at {path}, found a symbolic link; replace the link "
                "with its target and run the command again"
            )
    for file in files:
        (stream.root / file).parent.mkdir(exist_ok=True)
        os.replace(built / file, stream.root / file)
    synchronise_tree(stream.root)
    write_manifest(stream, stream.root / MANIFEST)


def stream_at(out: Path, kind: str) -> Optional[Stream]:
    """Return the stream of the given kind at ``--out``, or None if the folder does not exist or is empty.

    Raises:
        AlmaError: ``--out`` is a stream of another kind, a file, a folder of unrelated files, or an empty mount point.
    """
    if (out / MANIFEST).exists():
        stream = Stream.open(out)
        if stream.kind != kind:
            raise AlmaError(f"--out {out}: expected a stream of {kind}, found {stream.kind}; choose another folder")
        return stream
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        found = "a folder with other files" if out.is_dir() else "a file"
        raise AlmaError(f"--out {out}: expected a stream or an empty folder, found {found}; choose another folder")
    if os.path.ismount(out):
        raise AlmaError(f"--out {out}: this folder is the mount point of a file system; choose a subfolder")
    return None


def refuse_other_command(out: Path, history: Sequence[Mapping[str, Any]], now: Mapping[str, Any], advice: str) -> None:
    """Raise AlmaError if the options or input differ from those of the command that made the stream at ``--out``.

    Args:
        out: folder of the stream.
        history: records of the commands that made the stream, oldest first.
        now: record of the new command: ``options`` (flag -> value) and ``inputs`` (one record per input file).
        advice: next step for the user, appended to error messages.
    """
    if not history:
        raise AlmaError(f"--out {out}: the manifest does not record the command that made the stream; {advice}")
    before = history[0]
    for flag in {**before["options"], **now["options"]}:
        old, new = before["options"].get(flag), now["options"].get(flag)
        if old != new:
            old, new = (f"the default of {flag}" if value is None else f"{flag} {value}" for value in (old, new))
            raise AlmaError(f"--out {out}: the stream was made with {old}, not with {new}; {advice}")
    if before["inputs"] != now["inputs"]:
        changed = [str(new["name"]) for new in now["inputs"] if new not in before["inputs"]]
        difference = f"changed or new files: {', '.join(changed[:3])}" if changed else "missing or moved files"
        raise AlmaError(f"--out {out}: the stream was made from different input ({difference}); {advice}")


def recorded_name(path: Path) -> str:
    """Return the name of a file for a manifest. An escape such as ``\\xff`` replaces each byte that is not UTF-8."""
    return os.fsencode(path.name).decode("utf-8", "backslashreplace")
