"""What fairseq-train says in its log while it runs, for `StageProgress`."""

import json
from typing import Any, Callable, Optional

from fairseq_alma.watch.progress import StageProgress


def parse_log_line(line: str) -> Optional[dict[str, Any]]:
    """Return the figures in a line that fairseq wrote with ``--log-format json``, or None."""
    start = line.find("| {")
    if start < 0 or "train_inner" not in line[:start]:
        return None
    try:
        return json.loads(line[start + 2 :])
    except ValueError:
        return None


def watch_fairseq(
    progress: StageProgress, words_per_token: float, max_epoch: Optional[int] = None, first_update: int = 0
) -> Callable[[str], None]:
    """Return what takes the lines of a log and shows them.

    Args:
        progress: of the training.
        words_per_token: of the data; fairseq counts tokens.
        max_epoch: passes over the data after which the training ends, if updates do not end it before.
        first_update: updates that the optimizer had made when the stage began; fairseq counts them too.
    """
    limit = progress.max_update

    def watch(line: str) -> None:
        figures = parse_log_line(line)
        if figures is None or "num_updates" not in figures:
            return
        num_updates, epochs = int(figures["num_updates"]) - first_update, float(figures.get("update") or 0)
        if max_epoch is not None and epochs > 0:
            # fairseq's "update" counts passes over the data, with a fraction.
            by_epochs = max(num_updates, round(num_updates * max_epoch / epochs))
            progress.max_update = by_epochs if limit is None else min(limit, by_epochs)
        loss = figures["nll_loss"] if "nll_loss" in figures else figures["loss"]
        rate = float(figures["wps"]) * words_per_token if "wps" in figures else None
        progress.update(num_updates, float(loss), rate)

    return watch
