"""What the terminal shows of a stage: a bar where standard error is a terminal, a line now and then elsewhere."""

import json
import math
import sys
import time
from typing import Any, Callable, Mapping, Optional, SupportsFloat

from tqdm import tqdm

from fairseq_alma.learners.plan import StagePlan, Training

LINE_EVERY_SECONDS = 15.0
BAR_EVERY_SECONDS = 0.1
LOSS_UNITS = {"word": "bits", "image": "nats"}


def parse_log_line(line: str) -> Optional[dict[str, Any]]:
    """Return the figures in a line that fairseq wrote with ``--log-format json``, or None."""
    start = line.find("| {")
    if start < 0 or "train_inner" not in line[:start]:
        return None
    try:
        return json.loads(line[start + 2 :])
    except ValueError:
        return None


def describe_stage(plan: StagePlan, num_stages: int) -> str:
    """Name a stage for people: ``stage 0/3 (mega-batch 0)``; stages and mega-batches count from 0, as in the files."""
    data = plan.stage.megabatches
    span = f"mega-batch {data[0]}" if len(data) == 1 else f"mega-batches {data[0]}-{data[-1]}"
    return f"stage {plan.stage.index}/{num_stages - 1} ({span})"


class StageProgress:
    """Shows one training while it runs.

    To be called after every update: most calls return at once, and ``loss`` is looked at only when it is shown.

    Args:
        title: names stage and member.
        unit: what the learner reads, ``word`` or ``image``; decides what loss and rate are counted in.
        max_update: updates in all; None: not known.
        done: updates that an earlier launch has done.
    """

    def __init__(self, title: str, unit: str, max_update: Optional[int] = None, done: int = 0) -> None:
        self.title = title
        self.unit = unit
        self.max_update = max_update
        self.first: Optional[tuple[int, float]] = None
        self.last_shown = time.monotonic()
        self.bar: Optional[tqdm] = None
        if sys.stderr.isatty():
            # tqdm's monitor would be a thread, and forking with threads around asks for trouble.
            tqdm.monitor_interval = 0
            self.bar = tqdm(total=max_update, initial=done, desc=title, unit="update", dynamic_ncols=True)
        else:
            print(f"{title}: training", file=sys.stderr, flush=True)

    def __enter__(self) -> "StageProgress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(
        self, num_updates: int, loss: Optional[SupportsFloat] = None, rate: Optional[SupportsFloat] = None
    ) -> None:
        """Take the figures of the training as it is now.

        Args:
            num_updates: updates since the stage began, those of earlier launches included.
            loss: of the last updates, bits per token or nats per image; a tensor is fetched only when it is shown.
            rate: words or images per second.
        """
        now = time.monotonic()
        if self.first is None:
            self.first = num_updates, now
        if now - self.last_shown < (BAR_EVERY_SECONDS if self.bar is not None else LINE_EVERY_SECONDS):
            return
        self.last_shown = now
        shown = _figures(self.unit, loss, rate)
        if self.bar is not None:
            self.bar.set_postfix_str(", ".join(shown), refresh=False)
            self.bar.update(num_updates - self.bar.n)
        else:
            print(f"{self.title}: " + ", ".join([self._count(num_updates), *shown]), file=sys.stderr, flush=True)

    def _count(self, updates: int) -> str:
        if self.max_update is None:
            return f"{updates:,} updates"
        count = f"{updates:,}/{self.max_update:,} updates"
        if self.first is None or updates == self.first[0]:
            return count
        pace = (time.monotonic() - self.first[1]) / (updates - self.first[0])
        return f"{count}, {_duration(pace * (self.max_update - updates))} left"


def watch_fairseq(progress: StageProgress, words_per_token: float) -> Callable[[str], None]:
    """Return what takes the lines of a log of fairseq-train and shows them.

    Args:
        progress: of the training.
        words_per_token: of the data; fairseq counts tokens.
    """

    def watch(line: str) -> None:
        figures = parse_log_line(line)
        if figures is None or "num_updates" not in figures:
            return
        loss = figures["nll_loss"] if "nll_loss" in figures else figures["loss"]
        rate = float(figures["wps"]) * words_per_token if "wps" in figures else None
        progress.update(int(figures["num_updates"]), float(loss), rate)

    return watch


class StageReporter:
    """Tells about whole stages on standard output.

    Args:
        num_stages: of the run.
    """

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages

    def skipped(self, plan: StagePlan, record: Mapping[str, Any]) -> None:
        """Say that a stage was complete already."""
        print(f"{describe_stage(plan, self.num_stages)}: complete already, {_result(record)}", flush=True)

    def trained(self, plan: StagePlan, training: Training) -> None:
        """Say that one member of a stage is trained, and that the stage waits for the others."""
        print(
            f"{describe_stage(plan, self.num_stages)}: member {training.model.member} is trained; the stage is "
            "complete after a call without --member",
            flush=True,
        )

    def completed(self, plan: StagePlan, record: Mapping[str, Any]) -> None:
        """Say that a stage is complete now."""
        print(
            f"{describe_stage(plan, self.num_stages)}: {_result(record)}, {record['num_updates']:,} updates, "
            f"{record['num_params']:,} parameters, {_duration(record['wall_seconds'])}",
            flush=True,
        )


def _result(record: Mapping[str, Any]) -> str:
    test, valid = record["test"], record["valid"]
    if "ppl" in test:
        return f"perplexity {test['ppl']:.2f} on test, {valid['ppl']:.2f} on valid"
    return f"error {test['error']:.2%} on test, {valid['error']:.2%} on valid"


def _figures(unit: str, loss: Optional[SupportsFloat], rate: Optional[SupportsFloat]) -> list[str]:
    """Spell loss and speed where they are known."""
    shown = [] if loss is None else [f"loss {float(loss):.3f} {LOSS_UNITS[unit]}"]
    if rate is not None and math.isfinite(float(rate)):
        shown.append(f"{float(rate):,.0f} {unit}s/s")
    return shown


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
