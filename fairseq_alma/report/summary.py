"""Sentences of a report: which learner was best; for a single run on text, the gain of its last arrival."""

import json
import math
from typing import Iterator, Optional, Sequence

from fairseq_alma.report.experiment import Experiment
from fairseq_alma.report.read_run import RecordedRun
from fairseq_alma.report.table import show_count
from fairseq_alma.report.tables import measure
from fairseq_alma.runs.run_folder import RunFolder

OVERFIT, UNDERFIT = 0.10, 0.03
"""Nats per token by which the training text is predicted better than the test text; rules of thumb."""
SAMPLE = "sample.txt"
"""Text that the newest model wrote, in the run's folder, if somebody put it there."""


def sentences(groups: Sequence[Experiment]) -> list[str]:
    """Return which learner was best at the end and on average, by how much, and over how many seeds.

    Complete runs on streams of the same length count; an empty list for fewer than two experiments.
    """
    longest = max(len(each.first.arrivals) for each in groups)
    complete = [each for each in groups if each.is_complete and len(each.first.arrivals) == longest]
    if len(complete) < 2:
        return []
    value, _, over_stream = measure(complete[0].first)
    is_text = complete[0].first.is_text
    unit, digits = ("", 2) if is_text else (" %", 1)
    lines = []
    for when, name, figure in (
        ("at the end", f"test {value}", lambda run: run.final),
        (f"over all {longest} arrivals", over_stream, lambda run: run.over_stream),
    ):
        ranked = sorted(
            ((found, each) for each in complete if (found := each.spread(figure)) is not None),
            key=lambda pair: pair[0].mean,
        )
        (best, winner), (second, runner_up) = ranked[0], ranked[1]
        seeds = len(best.by_seed)
        gap = best.minus(second)
        half = math.nan if gap is None else gap.half_interval()
        if math.isnan(half):
            doubt = " Fewer than two seeds in common: another seed may change the order."
        elif gap is not None and abs(gap.mean) <= half:
            doubt = " Over these seeds the difference could be chance (95 % interval)."
        else:
            doubt = ""
        percent = 100 * (1 - best.mean / second.mean) if second.mean else 0.0
        shown = (
            f"{best.show(digits)}{unit if name != over_stream else ''} over {seeds} {'seed' if seeds == 1 else 'seeds'}"
        )
        other = f"{percent:.1f} % lower than {runner_up.name} ({second.show(digits)})"
        lines.append(f"Best {when}: {winner.name}, {name} {shown}, {other}.{doubt}")
    return lines


def own_numbers(run: RecordedRun) -> Iterator[tuple[str, str]]:
    """Yield titles and sentences about a run on text: newest model, gain of the last arrival, training."""
    done = run.done
    if not run.is_text or done.empty:
        return
    last = done.iloc[-1]
    bits = "" if math.isnan(run.bits_per_byte) else f", {run.bits_per_byte:.3f} bits per byte"
    arrivals = f"mega-batch {done.index[-1] + 1} of {len(run.arrivals)}"
    yield (
        "Newest model",
        f"after {arrivals}: test perplexity {last.value:.2f}{bits}, {show_count(last.num_params)} parameters",
    )
    if len(done) > 1:
        before = done.iloc[-2].value
        better = "lower" if last.value <= before else "higher"
        yield (
            "Last arrival",
            f"test perplexity {100 * abs(1 - last.value / before):.1f} % {better} than before ({before:.2f})",
        )
    if (train := _training_loss(run, int(last.stage))) is not None and last.value > 0:
        yield "Training and test", _compared(train, math.log(last.value))


def sample(run: RecordedRun) -> Optional[str]:
    """Return the text in `SAMPLE` of a run's folder, at most 2,000 characters."""
    path = run.path / SAMPLE
    return path.read_text(encoding="utf-8", errors="replace")[:2000].strip() if path.is_file() else None


def _training_loss(run: RecordedRun, stage: int) -> Optional[float]:
    """Return the training loss of the last epoch of a stage's first member, nats per token; None without a log."""
    path = RunFolder(run.path).stage_folder(stage) / "train-member-0.log"
    try:
        lines = [
            line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if "| train | {" in line
        ]
        figures = json.loads(lines[-1].split("| train | ", 1)[1])
        return float(figures.get("train_nll_loss", figures["train_loss"])) * math.log(2)
    except (OSError, IndexError, KeyError, TypeError, ValueError):
        return None


def _compared(train: float, test: float) -> str:
    """Describe what the loss on training text next to that on test text means, both in nats per token."""
    found = f"perplexity {math.exp(train):.2f} in the last epoch of training, {math.exp(test):.2f} on the test set: "
    if test - train > OVERFIT:
        return found + "the model overfits; use more text, fewer passes or a smaller model"
    if test - train < UNDERFIT:
        return found + "the model does not overfit; more passes or a larger model would still help"
    return found + "the model overfits a little; more text would help more than more passes"
