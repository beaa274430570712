"""Notices that runs have got further, by looking at their folders now and then."""

import time
from pathlib import Path
from typing import Iterator, Sequence

from fairseq_alma.runs.run_folder import RUN_RECORD, STAGE_RECORD

POLL_SECONDS = 2.0


def changes(paths: Sequence[Path]) -> Iterator[None]:
    """Yield at once, and then each time that a stage has become complete or a run has begun; without end.

    Args:
        paths: folders of runs, which need not exist yet.
    """
    while True:
        seen = _state(paths)
        yield
        while _state(paths) == seen:
            time.sleep(POLL_SECONDS)


def _state(paths: Sequence[Path]) -> list[tuple[bool, int, int]]:
    """Return for each run whether it has begun, how many stages are complete, and when the last one was."""
    state = []
    for path in paths:
        stamps = [record.stat().st_mtime_ns for record in path.glob(f"stage-*/{STAGE_RECORD}")]
        state.append(((path / RUN_RECORD).is_file(), len(stamps), max(stamps, default=0)))
    return state
