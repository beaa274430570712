"""Regret: what a learner that learns sequentially loses, at each arrival, against retraining on all so far.

The oracle of arrival t is an i.i.d. control (``--iid``) on the first t + 1 mega-batches, over the same backbone, with
no fewer parameters and as many updates or epochs for each mega-batch; of several, with other learning rates for
instance, the one with the lowest figure on valid. Regrets are differences of test losses in nats over seeds that both
have.
"""

import math
from typing import Any, Optional, Sequence

from pandas import DataFrame

from fairseq_alma.metrics.anytime import updates_for_loss
from fairseq_alma.options import TRAINING, options_of
from fairseq_alma.report.experiment import Experiment, naming_of
from fairseq_alma.report.finding import Comparison, Finding
from fairseq_alma.report.sentences import said
from fairseq_alma.report.spelling import MAX_UPDATE
from fairseq_alma.report.spread import Spread, half_width
from fairseq_alma.report.table import NOTHING, Cell, Table, interval_cell
from fairseq_alma.training.feature import FEATURES

NO_LESS = 0.98  # share of a run's parameters that a control must have
MARGIN = math.log(1.01)  # 1 % of perplexity, in nats
CLAIM = (
    "Anytime training (a carried optimizer, an average or a branch) is as good as retraining: at every arrival the "
    "95 % interval of its perplexity over that of the i.i.d. control lies below 1 %; of each run, the arrival that "
    "decides is named."
)
NEEDED = (
    "runs with options of anytime training beside controls of their size and updates at every arrival (--iid 1, "
    "2, ...), two seeds or more of each"
)


def regret_table(groups: Sequence[Experiment]) -> Table:
    """Lay out the regret of each sequential learner that has an oracle, a row for each; all over one kind of data."""
    found = [(each, pairs) for each in groups if not each.first.iid and (pairs := _pairs(each, groups))]
    naming = naming_of([each for each, _ in found])
    arrivals = sorted({arrival for _, pairs in found for arrival in pairs})
    rows = []
    for each, pairs in found:
        gaps = {arrival: gap for arrival, (own, best, _) in pairs.items() if (gap := _gap(best, own)) is not None}
        cells = {f"t{arrival}": interval_cell(gaps.get(arrival)) for arrival in arrivals}
        rows.append({**naming(each), **cells, "sum": interval_cell(_sum(list(gaps.values())))})
        made = each.arrivals[each.arrivals.run == each.runs.index[0]].set_index("arrival").num_updates.loc[: max(pairs)]
        points = [(updates, best.mean) for _, best, updates in pairs.values()]
        multiplier = compute_multiplier(points, pairs[max(pairs)][0].mean, made.sum())
        rows[-1]["compute multiplier"] = NOTHING if multiplier is None else Cell(f"{multiplier:.2f}", multiplier)
    return Table("regret", *said("regret"), DataFrame(rows))


def compute_multiplier(oracle: Sequence[tuple[float, float]], loss: float, updates: float) -> Optional[float]:
    """Return how many times its own updates the oracle needs for a learner's loss; None: its losses do not tell.

    Args:
        oracle: updates of each control and its loss, in the order of the arrivals.
        loss: of the learner after its last update, in nats.
        updates: that it has made in all.
    """
    needed = updates_for_loss(oracle, loss) if len(oracle) > 1 else None
    return None if needed is None else needed / updates


def regret_finding(groups: Sequence[Experiment]) -> Optional[Finding]:
    """Say whether anytime training of text is as good as retraining, at every arrival.

    Experiments with an update that has no control say nothing; but for one at t0, where there was nothing before. Of
    each other the arrival counts that decides: one whose interval lies above the margin, else the one whose interval
    reaches highest. None: no run has options of anytime training.
    """
    ours = [each for each in groups if not each.first.iid and _is_anytime(each)]
    comparisons = []
    for each in ours:
        pairs = _pairs(each, groups)
        planned = each.arrivals[each.arrivals.planned].arrival
        if pairs and set(planned) - {0} <= pairs.keys():
            found = [_against_margin(each, arrival, own, best) for arrival, (own, best, _) in pairs.items()]
            comparisons.append(max(found, key=_deciding))
    return Finding(CLAIM, "not of the paper", NEEDED, comparisons) if ours else None


def _is_anytime(experiment: Experiment) -> bool:
    given = experiment.first.options
    offered = [option for kind in FEATURES for option in options_of(kind).values() if option.side != TRAINING]
    return any(given.get(option.name) is not None for option in offered if "text" in option.kinds)


def _against_margin(each: Experiment, arrival: int, own: Spread, best: Spread) -> Comparison:
    """Compare a loss with that of retraining and the margin: it is lower where the regret's interval is below this."""
    limit = Spread.of({seed: loss + MARGIN for seed, loss in best.by_seed.items()})
    assert limit is not None
    what = f"test loss after t{arrival}, nats"
    return Comparison(each.name, f"retraining + {MARGIN:.5f}", own, limit, what, digits=4)


def _deciding(comparison: Comparison) -> tuple[bool, float]:
    """Rank comparisons by how much they speak against the claim: contradictions first, then by the upper bound."""
    gap = _gap(comparison.high, comparison.low)
    if gap is None:
        return comparison.outcome < 0, comparison.low.mean - comparison.high.mean
    return comparison.outcome < 0, gap.mean + (half_width(gap) or 0.0)


def _losses(experiment: Experiment, arrival: int, column: str) -> Optional[Spread]:
    """Return a loss at an arrival, in nats, over seeds; of text from perplexities, which have more digits."""
    rows = experiment.arrivals[(experiment.arrivals.arrival == arrival) & experiment.arrivals.done]
    is_text = experiment.first.is_text
    values = rows[{"test": "value", "valid": "valid"}[column] if is_text else "loss"]
    seeds = (experiment.runs.seeds[run] for run in rows.run)
    return Spread.of(dict(zip(seeds, map(math.log, values) if is_text else values, strict=True)))


def _pairs(each: Experiment, groups: Sequence[Experiment]) -> dict[int, tuple[Spread, Spread, float]]:
    """Return by arrival the test losses of an experiment and of its oracle, and the updates of the oracle."""
    found = {}
    for arrival in sorted({control.first.iid - 1 for control in groups if control.first.iid}):
        own, oracle = _losses(each, arrival, "test"), _oracle(each, arrival, groups)
        best = None if oracle is None else _losses(oracle, arrival, "test")
        if own is not None and oracle is not None and best is not None:
            found[arrival] = own, best, float(oracle.arrivals[oracle.arrivals.done].num_updates.iloc[0])
    return found


def _oracle(each: Experiment, arrival: int, groups: Sequence[Experiment]) -> Optional[Experiment]:
    """Return the best of the controls at an arrival, over the same backbone and stream, that are no weaker."""
    same = [
        (valid.mean, rank, control)
        for rank, control in enumerate(groups)
        if control.first.iid == arrival + 1
        and _trained_alike(control.first) == _trained_alike(each.first)
        and _num_params(control, arrival) >= NO_LESS * _num_params(each, arrival)
        and (valid := _losses(control, arrival, "valid")) is not None
    ]
    return min(same)[2] if same else None


def _trained_alike(run: Any) -> tuple[Any, ...]:
    """Return what a run and its controls share: stream, backbone, and the updates or epochs for each mega-batch."""
    lengths = (run.train_options.get(name) for name in (MAX_UPDATE, "--max-epoch"))
    return run.stream_key, run.backbone, *lengths


def _num_params(experiment: Experiment, arrival: int) -> float:
    """Return how many parameters predict after an arrival."""
    rows = experiment.arrivals[experiment.arrivals.done & (experiment.arrivals.arrival <= arrival)]
    return float(rows.num_params.max()) if len(rows) else 0.0


def _gap(best: Spread, own: Spread) -> Optional[Spread]:
    """Return the regret over shared seeds, be it a single one."""
    return Spread.of({seed: own.by_seed[seed] - best.by_seed[seed] for seed in own.by_seed if seed in best.by_seed})


def _sum(gaps: Sequence[Spread]) -> Optional[Spread]:
    """Return the sum over arrivals for each seed that has all of them."""
    seeds = [seed for seed in (gaps[0].by_seed if gaps else ()) if all(seed in gap.by_seed for gap in gaps)]
    return Spread.of({seed: sum(gap.by_seed[seed] for gap in gaps) for seed in seeds})
