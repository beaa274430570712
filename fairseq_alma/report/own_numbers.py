"""What one run on text came to, in words: the page and the terminal begin with it where there is a single run.

Only what its records, its last training log and its stream say; what is missing there is left out. The rules of thumb
(`LEARNED_BY_HEART`, `STILL_LEARNING`) are no results of the paper's.
"""

import json
import math
from pathlib import Path
from typing import Any, Iterator, Optional

import numpy as np

from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.report.read_run import RunTable
from fairseq_alma.report.spelling import show_count
from fairseq_alma.runs.lookup import stream_of_run
from fairseq_alma.runs.run_folder import RunFolder
from fairseq_alma.runs.study import is_begun_on

LEARNED_BY_HEART, STILL_LEARNING = 0.10, 0.03
"""Nats a token by which the training text is predicted better than the test text."""
FORETOLD = 20
"""Percent by which the last update may have lowered perplexity for the next one to be foretold; see `_next`."""


def own_numbers(runs: RunTable) -> list[tuple[str, str]]:
    """Return titles and sentences on a run on text; nothing for several runs, images, or before the first update."""
    facts = runs.facts
    done = runs.arrivals[runs.arrivals.done.astype(bool)]
    if len(facts) != 1 or not facts.is_text.iloc[0] or done.empty:
        return []
    return list(_said(facts.iloc[0], done.sort_values("arrival")))


def own_text(numbers: list[tuple[str, str]]) -> str:
    """Return the same as lines for a terminal."""
    return "".join(f"{title}: {sentence}\n" for title, sentence in numbers)


def _said(run: Any, done: Any) -> Iterator[tuple[str, str]]:
    last, counts = done.iloc[-1], (run.stream.get("test") or {})
    log_ppl = np.log(done.value.to_numpy())
    shown = _shown(last.value, counts)
    yield (
        "Newest",
        f"after mega-batch {last.arrival + 1} of {run.num_arrivals}: {shown} on the test set, "
        f"{show_count(last.num_params)} parameters",
    )
    gain = math.nan
    if len(done) > 1:
        gain = 100 * -math.expm1(log_ppl[-1] - log_ppl[-2])
        better = "lower" if gain >= 0 else "higher"
        yield "Last update", f"test perplexity {abs(gain):.1f} % {better} than before it ({done.value.iloc[-2]:.2f})"
    if (passes := _passes(run, last)) is not None:
        tokens, times = passes
        yield "Training", f"{last.num_updates:,.0f} updates, {times:.1f} passes over {show_count(tokens)} new tokens"
    if (train := _training_loss(run.path, last.stage)) is not None:
        yield "Training text", _beside(train, log_ppl[-1])
    if 0 <= gain <= FORETOLD and run.iid == 0:
        yield "Forecast", f"{_shown(_next(done), counts)} after another such mega-batch, if it goes on as it went"


def _shown(ppl: float, test: dict[str, int]) -> str:
    tokens, size = test.get("num_tokens", 0), test.get("num_bytes", 0)
    bits = f"{math.log2(ppl) * tokens / size:.3f} bits per byte, " if size and ppl > 0 else ""
    return f"{bits}perplexity {ppl:.2f}"


def _passes(run: Any, last: Any) -> Optional[tuple[int, float]]:
    """Return the tokens that came since the update before, and how often they were read; None without the stream."""
    folder = RunFolder(run.path)
    try:
        record, stage = folder.read_run(), folder.read_stage(int(last.stage))
        assert record is not None and stage is not None  # they were read before
        stream = Stream.open(stream_of_run(folder, record))
        if not is_begun_on(record, stream):
            return None
        tokens = sum(stream.megabatch(number).num_tokens for number in stage["megabatches"])
    except AlmaError:
        return None
    return (tokens, stage["train_tokens"] / tokens) if tokens and "train_tokens" in stage else None


def _training_loss(run: Path, stage: float) -> Optional[float]:
    """Return the mean training loss of the last pass of a stage's first member, nats a token; None where no log is."""
    path = RunFolder(run).stage_folder(int(stage)) / "train-member-0.log"
    try:
        lines = [
            line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if "| train | {" in line
        ]
        figures = json.loads(lines[-1].split("| train | ", 1)[1])
        return float(figures.get("train_nll_loss", figures["train_loss"])) * math.log(2)
    except (OSError, IndexError, KeyError, TypeError, ValueError):
        return None


def _beside(train: float, test: float) -> str:
    """Say what the loss on the training text beside that on the test text means, both in nats."""
    said = f"perplexity {math.exp(train):.2f} in its last pass, {math.exp(test):.2f} on the test set: "
    if test - train > LEARNED_BY_HEART:
        return said + "much of it is learned by heart; more text, fewer passes or a smaller model would help"
    if test - train < STILL_LEARNING:
        return said + "hardly any of it is learned by heart; more passes or a larger model would still help"
    return said + "some of it is learned by heart; more text would help more than more passes"


def _next(done: Any) -> float:
    """Return the test perplexity after one more update like the last: a line through the last two.

    Of the loss over the logarithm of all updates so far. In the kept records of language runs (``recipes/records``) the
    median of its errors was 1 % where the update before had lowered perplexity by up to 10 %, 2 % up to 20 %, and 12 %
    beyond (95, 180 and 200 arrivals).
    """
    updates, loss = done.num_updates.cumsum().to_numpy(), np.log(done.value.to_numpy())
    slope = (loss[-1] - loss[-2]) / math.log(updates[-1] / updates[-2])
    return math.exp(loss[-1] + slope * math.log(1 + done.num_updates.iloc[-1] / updates[-1]))
