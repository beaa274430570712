"""What stands at ``--out`` before a command begins, and whether the same command has put it there."""

from pathlib import Path
from typing import Any, Mapping, Optional

from fairseq_alma.data.manifest import MANIFEST
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError


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


def refuse_other_command(out: Path, before: Mapping[str, Any], now: Mapping[str, Any], advice: str) -> None:
    """Raise AlmaError unless the command that made a stream is the one that is given now.

    Args:
        out: the stream's folder.
        before: what the manifest records of the command: ``options`` by their flags, and ``inputs``, each with ``name``
            and digest.
        now: the same of the command that is given now.
        advice: what to do if they differ.
    """
    for flag in {**before["options"], **now["options"]}:
        old, new = (entry["options"].get(flag) for entry in (before, now))
        if old != new:
            raise AlmaError(
                f"--out {out}: the stream there was made with {flag} {_shown(old)}, not {_shown(new)}; {advice}"
            )
    if before["inputs"] != now["inputs"]:
        changed = [new["name"] for new in now["inputs"] if new not in before["inputs"]]
        which = f"{', '.join(changed[:3])} is not what it was made from" if changed else "files are missing or moved"
        raise AlmaError(f"--out {out}: the stream there was made from other input: {which}; {advice}")


def _shown(value: object) -> str:
    return "left to its default" if value is None else str(value)
