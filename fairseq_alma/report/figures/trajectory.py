"""How good a learner was so far, and what it had cost by then: what the trade-offs are drawn from.

Source: equations 1 and 2 of the paper, over the arrivals so far (Figure 5).
"""

import statistics
from dataclasses import dataclass
from itertools import accumulate

from fairseq_alma.metrics.anytime import in_force
from fairseq_alma.report.figures.run_groups import RunGroup, shown_curve
from fairseq_alma.report.run_figures import RunFigures

TERA = 1e12


@dataclass(frozen=True)
class Point:
    """A learner after one arrival.

    Attributes:
        arrival: 0 to B-1.
        average: mean over the arrivals so far of the test perplexity, or of the test error in percent.
        tflops: spent on training so far, in 10^12 operations.
        params: of what predicts.
        experts: in each layer that has some, over all models that predict together.
    """

    arrival: int
    average: float
    tflops: float
    params: float
    experts: float


def trajectory(group: RunGroup) -> list[Point]:
    """Return the points of a group from its first update on, means over the seeds that got furthest."""
    return [_mean(points) for points in zip(*(_trajectory(run) for run in group.furthest), strict=True)]


def _trajectory(run: RunFigures) -> list[Point]:
    curve = shown_curve(run)
    first = min(run.value)
    num_arrivals = len(curve)
    sums = list(accumulate(curve))
    tflops = list(accumulate(run.train_flops.get(arrival, 0.0) / TERA for arrival in range(num_arrivals)))
    params = in_force(run.num_params, num_arrivals, 0)
    all_experts = {arrival: experts * run.num_members[arrival] for arrival, experts in run.num_experts.items()}
    experts = in_force(all_experts, num_arrivals, 0)
    return [
        Point(arrival, sums[arrival] / (arrival + 1), tflops[arrival], params[arrival], experts[arrival])
        for arrival in range(first, num_arrivals)
    ]


def _mean(points: tuple[Point, ...]) -> Point:
    def mean(name: str) -> float:
        return statistics.fmean(getattr(point, name) for point in points)

    return Point(points[0].arrival, mean("average"), mean("tflops"), mean("params"), mean("experts"))
