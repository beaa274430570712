"""Compose the sentences of a report about the best learner or about a single run on text."""

import math
import re
from typing import Iterator, Sequence

from fairseq_alma.report.experiment import Experiment
from fairseq_alma.report.read_run import RecordedRun
from fairseq_alma.report.table import show_count
from fairseq_alma.report.tables import metric_names
from fairseq_alma.runs.run_folder import TRAIN_LOG, RunFolder


def sentences(groups: Sequence[Experiment]) -> list[str]:
    """Return sentences about the best learner at the end of the stream and over all arrivals.

    Compare only complete experiments on the longest streams. Return an empty list for fewer than two such experiments.
    """
    longest = max(len(each.first.arrivals) for each in groups)
    complete = [each for each in groups if each.is_complete and len(each.first.arrivals) == longest]
    if len(complete) < 2:
        return []
    value, _, over_stream = metric_names(complete[0].first)
    unit, digits = ("", 2) if complete[0].first.is_text else (" %", 1)
    lines = []
    for when, name, figure in (
        ("at the end", f"test {value}", lambda run: run.final),
        (f"over all {longest} arrivals", over_stream, lambda run: run.over_stream),
    ):
        spreads = ((each.spread(figure), each) for each in complete)
        ranked = sorted(((spread, each) for spread, each in spreads if spread), key=lambda pair: pair[0].mean)
        (best, winner), (second, runner_up) = ranked[:2]
        gap, seeds = best.minus(second), len(best.by_seed)
        doubt = ""
        if gap is None or len(gap.by_seed) < 2:
            doubt = " Fewer than two common seeds: another seed may change the order."
        elif abs(gap.mean) <= gap.half_interval():
            doubt = " The difference is not significant over these seeds (95 % confidence interval)."
        percent = 100 * (1 - best.mean / second.mean) if second.mean else 0.0
        shown = f"{best.show(digits)}{unit if name != over_stream else ''}"
        over = f"over {seeds} {'seed' if seeds == 1 else 'seeds'}"
        other = f"{percent:.1f} % lower than {runner_up.name} ({second.show(digits)})"
        lines.append(f"Best {when}: {winner.name}, {name} {shown} {over}, {other}.{doubt}")
    return lines


def describe_run(run: RecordedRun) -> Iterator[tuple[str, str]]:
    """Yield (title, sentence) pairs about a run on text: newest model, gain of the last arrival, perplexities."""
    done = run.done
    if not run.is_text or done.empty:
        return
    last = done.iloc[-1]
    bits = "" if math.isnan(run.bits_per_byte) else f", {run.bits_per_byte:.3f} bits per byte"
    arrivals = f"mega-batch {done.index[-1] + 1} of {len(run.arrivals)}"
    size = show_count(last.num_params)
    yield "Newest model", f"after {arrivals}: test perplexity {last.value:.2f}{bits}, {size} parameters"
    if len(done) > 1:
        before = done.iloc[-2].value
        gain = f"{100 * abs(1 - last.value / before):.1f} % {'lower' if last.value <= before else 'higher'}"
        yield "Last arrival", f"test perplexity {gain} than after the previous update ({before:.2f})"
    log = RunFolder(run.path).stage_folder(int(last.stage)) / TRAIN_LOG.format(0)
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    if losses := re.findall(r'\| train \| \{.*"train_nll_loss": "([\d.]+)"', text):
        train = 2 ** float(losses[-1])  # fairseq logs the loss in bits per token.
        yield "Training and test", f"train perplexity {train:.2f} in the last epoch, test perplexity {last.value:.2f}"
