"""``update.json`` of ``alma-update``: the months of text that a model was trained on, and decisions about training."""

from pathlib import Path
from statistics import fmean
from typing import Iterator, Optional, Sequence

import msgspec
from msgspec import Struct

from fairseq_alma.errors import AlmaError
from fairseq_alma.files import as_record, read_json_object, require_version, write_json_atomically
from fairseq_alma.text.defaults import num_params, row_of

RECORD, VERSION = "update.json", 2
STREAM, LOG = "stream", "update.log"
BUDGET = 3.0
LEAST_PASSES = 1.0
"""Minimum number of passes through the new text, even if ``--size`` or ``--redo`` has used up the budget."""
LEAST_RESTART = 1.5
"""Minimum number of passes through all text that a larger model needs to reach the loss of the current model."""
TOKENS_PER_PARAMETER = 8
"""Maximum number of tokens (of all text so far) per parameter; above this number, a model is too small."""
AHEAD = 6
"""Expected growth factor of the text, for choosing the size of a new model (see how-to/monthly.md)."""
LEAST_TOKENS = 2_600_000
"""Minimum number of tokens for choosing the size of a new model, so that the width of the model is at least 128.

Bits per byte after six months of novels (mean over the months), by number of parameters:

- 1.15M (batch 2): 1.960
- 522k (batch 4): 2.004
- 320k (batch 8; size chosen from the text of the first month alone): 2.065"""
WORSE = 1.01
"""Maximum ratio of (bits per byte on old text after a month) to (before the month) without a warning."""


class Month(Struct, omit_defaults=True):
    """A month in ``update.json``. Test results are bits per byte, or None without held-out text."""

    step: tuple[str, float]  # result of `next_step`
    first: int  # index (from 0) of the newest month in the first stage of the run
    size: Optional[int] = None  # number of parameters of a new model; None if alma-stream chooses the size
    replaces: bool = False  # whether this month trains a new run, which then replaces the current run
    before: Optional[float] = None  # result on the held-out text of this month, before training on the month
    months: list[Optional[float]] = []  # result on the held-out text of each month so far, after training
    test: Optional[float] = None  # result on the test set of the first month, after training
    params: int = 0  # number of parameters; 0 before the training
    train_tokens: int = 0  # number of training tokens, including trainings that --redo replaced
    is_done: bool = False  # whether report and export are written


class UpdateRecord(Struct):
    """Content of ``update.json``."""

    version: int
    text: list[str]  # options of the first call for alma-prep-text
    words: list[str]  # options of the first call for fairseq-train
    months: list[Month]
    redo: Optional[Month] = None  # record of the newest month while --redo trains the month again

    def save(self, root: Path) -> None:
        """Write the record to the model folder."""
        write_json_atomically(root / RECORD, msgspec.to_builtins(self))


def read_record(root: Path) -> UpdateRecord:
    """Return the record of a model, empty for a new model. Raises AlmaError if ``root`` is not a model folder."""
    path, remedy = root / RECORD, "restore the file from a backup, or give a new MODEL"
    if path.exists():
        content = read_json_object(path, remedy)
        require_version(content.get("version"), VERSION, path, "give a new MODEL and the texts of all months")
        return as_record(content, UpdateRecord, path, remedy)
    others = {each.name for each in root.iterdir() if not each.name.startswith(".")} if root.is_dir() else set()
    if root.is_file() or others - {STREAM, LOG}:
        raise AlmaError(f"{root}: expected a folder of alma-update, found no {RECORD}; give a new folder as MODEL")
    return UpdateRecord(VERSION, [], [], [])


def next_step(parameters: int, tokens: Sequence[int], spent: float, budget: float = BUDGET) -> tuple[str, float]:
    """Decide whether to continue the training of the current model, or to train a new, larger model.

    Args:
        parameters: number of parameters of the current model; 0 if there is no model.
        tokens: number of tokens of each month so far, including the new month.
        spent: number of training tokens so far; each pass counts.
        budget: maximum number of training tokens of all months, divided by the number of tokens of all text so far.
            ``--size`` and ``--redo`` may exceed the budget.

    Returns:
        (``begin`` or ``restart``, passes of a new model through all text) or (``continue``, passes through the new
        text).
    """
    total = sum(tokens)
    affordable = (budget * total - spent) / total
    if not parameters:
        return "begin", budget
    if total > TOKENS_PER_PARAMETER * parameters and affordable >= LEAST_RESTART:
        return "restart", min(budget, affordable)
    return "continue", min(budget, max(LEAST_PASSES, (budget * total - spent) / tokens[-1]))


def new_size(tokens: float, vocab_size: int) -> int:
    """Return the number of parameters for a new model whose first training reads ``tokens`` tokens (in all passes)."""
    row = row_of(max(LEAST_TOKENS, AHEAD * tokens))
    return num_params(row.width, row.layers, vocab_size)


def describe(months: Sequence[Month]) -> Iterator[str]:
    """Yield lines about the newest month: bits per byte before and after training, and cost of training."""
    month, last = months[-1], months[-2] if len(months) > 1 else Month(("", 0), 0)
    rows = {
        "all text so far": ([*last.months, month.before], month.months),
        "old text": (last.months, month.months[:-1]),
        "new month": ([month.before], month.months[-1:]),
        "test set of the first month": ([last.test], [month.test]),
    }
    for what, values in rows.items():
        before, after = (fmean(known) if (known := [x for x in each if x is not None]) else None for each in values)
        if before is not None and after is not None:
            change = f"{abs(100 * (after / before - 1)):.1f} % {'worse' if after > before else 'better'}"
            yield f"{what}: {before:.3f} bits per byte before, {after:.3f} after ({change})"
            if what == "old text" and after > WORSE * before:
                yield f"warning: the loss on old text is {change} than before; for R passes, give --redo --budget R"
        elif after is not None:
            yield f"{what}: {after:.3f} bits per byte"
    action, passes = month.step
    how = {"begin": "new model", "restart": "new, larger model", "continue": "current model"}
    text = "the new text" if action == "continue" else "all text so far"
    order = " (first the new text, then samples of all months)" if action == "continue" else ""
    yield f"training: {how[action]}, {passes:.2g} passes through {text}{order}"
    yield f"model: {month.params:,} parameters, {sum(each.train_tokens for each in months):,} training tokens so far"
