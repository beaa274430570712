"""The figures of a run over its arrivals, from the ``stage.json`` files."""

from dataclasses import dataclass
from typing import Any, Mapping, Optional, Sequence

from fairseq_alma.learners.plan import StagePlan
from fairseq_alma.runs.run_folder import STAGE_RECORD, RunFolder

# What an update costs; a learner that waits spends none of it.
SPENT = ("num_updates", "train_tokens", "train_images", "train_flops", "wall_seconds")


@dataclass(frozen=True)
class Point:
    """What is known at one arrival.

    Attributes:
        arrival: number of the mega-batch that arrived, from 0.
        seconds: when its figures were known, in seconds since 1970.
        figures: name -> value; a slash groups names.
    """

    arrival: int
    seconds: float
    figures: Mapping[str, float]


def arrival_points(run: RunFolder, plans: Sequence[StagePlan]) -> list[Point]:
    """Return what is known of a run: one point for each arrival from the first update on.

    While a learner waits, the model of its last update counts, as in the paper's section 3.1.

    Args:
        run: its folder.
        plans: of all its stages.
    """
    points = []
    before: Optional[dict[str, float]] = None
    total = 0.0
    for plan in plans:
        record = run.read_stage(plan.stage.index)
        if record is None:
            before = None
            continue
        seconds = (run.stage_folder(plan.stage.index) / STAGE_RECORD).stat().st_mtime
        if before is not None:
            waiting = {**before, **{f"stage/{name}": 0.0 for name in SPENT if f"stage/{name}" in before}}
            points += [Point(arrival, seconds, waiting) for arrival in plan.stage.arrivals[:-1]]
        total += float(record["train_flops"])
        before = {**_flatten(record), "total/train_flops": total}
        points.append(Point(plan.stage.last_arrival, seconds, before))
    return points


def _flatten(record: Mapping[str, Any], group: str = "") -> dict[str, float]:
    """Return the numbers of a stage's record: ``test/loss``, ``stage/num_params``, …"""
    figures: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            figures.update(_flatten(value, f"{group}{name}/"))
        elif isinstance(value, (int, float)) and name != "stage":
            figures[f"{group or 'stage/'}{name}"] = float(value)
    return figures
