"""The paper's findings: for each, whether a set of runs bears it out, and the numbers that decide.

What they are stands in ``findings.toml``; here are the pairs of experiments that they choose from, and the figures.
"""

import functools
import math
import statistics
import tomllib
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, Mapping, Optional, Sequence

import numpy
from pandas import DataFrame, concat

from fairseq_alma.report.experiment import Experiment, experiments, sizes_in_order
from fairseq_alma.report.finding import Comparison, Finding
from fairseq_alma.report.read_run import RunTable
from fairseq_alma.report.regret import regret_finding
from fairseq_alma.report.spelling import TEXT
from fairseq_alma.report.spread import Spread
from fairseq_alma.report.tables import MEASURES, Measure, controls

COMPARABLE = 2.0  # factor between two budgets at which who gets less out of the smaller one has shown something
NO_MORE = 1.02  # factor by which a budget may be exceeded: the gates of a mixture cost that little
SMOOTH = 1e-3  # nats: a change of the validation loss by growth that passes for none; of perplexity, a thousandth
GROWING = ("gmoe", "firefly", "gens")
LEAST_WAITS = 3  # waiting times from which the best one is told
ALIKE = ["backbone", "variant", "gate", "num_experts_given", "num_arrivals"]
"""What experiments share that differ by their waiting times."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What findings are worked out from: the experiments on one stream, in one setting.

    Attributes:
        groups: the experiments.
        early: the arrival that ends the first tenth of the stream.
        controls: number of an experiment with i.i.d. controls -> the values of both, see `experiment.controls`.
        waits: number of the best experiment of a learner and size -> those of all its waiting times.
    """

    groups: Sequence[Experiment]
    measure: Measure
    early: int
    controls: Mapping[int, Mapping[int, tuple[Spread, Spread]]]
    waits: dict[int, list[int]] = field(default_factory=dict)


def all_findings(runs: RunTable) -> list[tuple[Any, list[Finding]]]:
    """Put the paper's findings to the test on each stream and for each setting, for which the facts of a run stand."""
    apart = [each for on_stream in runs.by("stream_key") for each in on_stream.by("setting")]
    return [(next(each.facts.itertuples()), _findings(each)) for each in apart]


@functools.cache
def _claims() -> list[dict[str, Any]]:
    text = resources.files(__package__).joinpath("findings.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["finding"]


def _findings(runs: RunTable) -> list[Finding]:
    groups = experiments(runs)
    kind, early = groups[0].first.kind, max(0, max(each.first.num_arrivals for each in groups) // 10 - 1)
    evidence = Evidence(groups, MEASURES[kind], early, {groups.index(each): found for each, found in controls(groups)})
    pairs = _pairs(evidence)
    words = {"anytime": MEASURES[kind].anytime, "early": "a tenth of the stream" if early else "one mega-batch"}
    copies = [max(spread.by_seed.values()) for each in groups if _copies(each) and (spread := each.spread("max_jump"))]
    findings = []
    for claim in _claims():
        if kind in claim["kinds"]:
            parts = [_compare(evidence, pairs, **rule) for rule in claim["compare"]]
            comparisons = [each for part in parts for each in part]
            lacks_part = claim.get("all_parts", False) and not all(any(each.decides for each in part) for part in parts)
            remark = claim["remark"].format(max(copies)) if "remark" in claim and copies else ""
            texts = {name: claim[name].format(**words) for name in ("claim", "source", "needed")}
            findings.append(Finding(**texts, comparisons=comparisons, remark=remark, lacks_part=lacks_part))
    if kind == TEXT and (regret := regret_finding(groups)) is not None:
        findings.append(regret)
    return findings


def _counts(experiment: Experiment) -> bool:
    """Tell whether it is a learner on the stream, not an i.i.d. control, with at least one complete run."""
    return len(experiment.complete) > 0 and not experiment.first.iid


def _gate(train_options: Mapping[str, str]) -> str:
    """Return how the gates of an image mixture choose, ``soft`` if nothing is said; empty without such gates."""
    is_mixture = "_moe_" in train_options.get("--arch", "")
    return str(train_options.get("--gate", "soft" if is_mixture else ""))


def _copies(experiment: Experiment) -> bool:
    run = experiment.first
    is_plain = _counts(experiment) and not run.replay and experiment.times == 1
    method = run.options.get("grow_method") or ("copy" if run.is_text else "split")
    return is_plain and run.learner == "gmoe" and method != "split"


def _experiments(evidence: Evidence) -> DataFrame:
    """Return a row for each experiment: what conditions in ``findings.toml`` may ask for, as ``low_...``, ``high_...``.

    ``rank`` is that of the backbone's size among complete runs; ``smallest`` and ``largest`` are there of several
    sizes only. ``num_params``, ``anytime``, ``memory`` and ``computation`` are means over seeds, other facts those of
    the furthest run.
    """
    groups = evidence.groups
    counting = [each.complete for each in groups if _counts(each)]
    ranks = {size: rank for rank, size in enumerate(sizes_in_order(concat(counting)) if counting else [])}
    frame = DataFrame([each.first for each in groups]).drop(columns="Index")
    votes = frame.options.map(lambda options: options.get("combine") == "vote") & (frame.learner == "ens")
    frame["learner"] = frame.learner.mask(votes, "vote")  # of the models of an Ens, which counts in its place
    frame["gate"] = [_gate(each.first.train_options) for each in groups]
    frame["num_experts_given"] = [str(each.first.train_options.get("--num-experts", "")) for each in groups]
    frame["label"], frame["times"] = [each.label for each in groups], [each.times for each in groups]
    for fact in ("num_params", "anytime", "memory", "computation"):
        spreads = [each.spread(fact) for each in groups]
        frame[fact] = [math.nan if spread is None else spread.mean for spread in spreads]
    # A gEns that waits for everything is the SM that does, figure by figure, and would count twice.
    figures = [tuple(each.spread(fact) for fact in ("anytime", "final")) for each in groups]
    known = [
        [each.first.num_arrivals, *(frozenset(spread.by_seed.items()) for spread in spreads if spread is not None)]
        for each, spreads in zip(groups, figures, strict=True)
    ]
    frame["same_as"] = [known.index(each) if len(each) > 1 else rank for rank, each in enumerate(known)]
    frame["counts"] = [_counts(each) for each in groups]
    frame["rank"] = frame.backbone.map(ranks).astype(float)
    frame["smallest"] = (frame["rank"] == 0) & (len(ranks) > 1)
    frame["largest"] = (frame["rank"] == len(ranks) - 1) & (len(ranks) > 1)
    frame["has_control"] = [rank in evidence.controls for rank in range(len(groups))]
    frame["splits"] = [each.first.learner == "gmoe" and not _copies(each) for each in groups]
    # A learner that would grow, and waits for so long that it never does, has not shown what growth is worth.
    frame["grows_if_it_can"] = ~frame.learner.isin(GROWING) | (frame.min_params < frame.max_params)
    # The sum over the stream of who waits for all of it is that of the untrained model, and tells nothing.
    is_early = frame.wait < frame.num_arrivals
    waits = frame[frame.counts & is_early & ~frame.replay & (frame.times == 1)].drop_duplicates([*ALIKE, "wait"])
    others = waits.groupby(ALIKE)
    least, most = others.wait.transform("min"), others.wait.transform("max")
    frame.loc[waits.index, "wait_place"] = "middle"
    frame.loc[waits.index[waits.wait == most], "wait_place"] = "most"
    frame.loc[waits.index[waits.wait == least], "wait_place"] = "least"
    best = waits[others.anytime.transform("min") == waits.anytime].drop_duplicates(ALIKE)
    frame["is_best_wait"] = frame.index.isin(best.index) & frame.index.isin(waits[least < most].index)
    evidence.waits.update({rank: [*others.groups[tuple(waits.loc[rank, ALIKE])]] for rank in best.index})
    return frame


def _pairs(evidence: Evidence) -> DataFrame:
    """Return all pairs of experiments, with what both have in common.

    ``usual_steps``: with as many updates in a stage as the fewest that a backbone has; ``plain``: also without replay;
    ``alike``: also of one size and waiting time; ``twins``: the same learner with as many experts.
    """
    frame = _experiments(evidence)
    high, low = (frame.assign(**{"": frame.index}).add_prefix(f"{side}_") for side in ("high", "low"))
    pairs = high.merge(low, how="cross").rename(columns={"high_": "high", "low_": "low"})
    is_text = evidence.measure.per == "token"
    for name in ("learner", "size", "wait", "label", "experts", "variant", "gate", "num_experts_given"):
        column = "backbone" if name == "size" else name
        pairs[f"same_{name}"] = pairs[f"low_{column}"] == pairs[f"high_{column}"]
    pairs["same_gate"] |= (pairs.low_gate == "") | (pairs.high_gate == "")
    pairs["same_length"] = pairs.low_num_arrivals == pairs.high_num_arrivals  # else sums over the stream do not compare
    counts = pairs.low_counts & pairs.high_counts & pairs.same_gate & pairs.same_length
    pairs["same_but_wait_and_size"] = (
        pairs.same_variant & pairs.same_num_experts_given & pairs.same_gate & pairs.same_length
    )
    pairs = pairs.assign(
        is_text=is_text, early=evidence.early, twins=pairs.same_label & pairs.same_variant & pairs.same_experts,
        usual_steps=counts & (pairs.low_times == 1) & (pairs.high_times == 1),
        without_replay=counts & ~pairs.low_replay & ~pairs.high_replay,
        ratio=numpy.maximum(pairs.low_num_params, pairs.high_num_params)
        / numpy.minimum(pairs.low_num_params, pairs.high_num_params),
        grown_from_low=(pairs.low_learner + pairs.high_learner).isin(["smgmoe", "ensgens"]),
    )  # fmt: skip
    pairs["plain"] = pairs.usual_steps & pairs.without_replay
    pairs["alike"] = pairs.plain & pairs.same_size & pairs.same_wait
    pairs["grow_if_they_can"] = pairs.plain & pairs.same_wait & pairs.low_grows_if_it_can & pairs.high_grows_if_it_can
    same = pairs.without_replay & pairs.same_variant & pairs.same_size & pairs.same_experts
    # Against every waiting time that is shorter than the stream; who waits for all makes as many updates.
    for eager, tardy in (("low", "high"), ("high", "low")):
        updates = pairs[f"{eager}_times"] * pairs[f"{eager}_num_planned"]
        waits_for_all = pairs[f"{tardy}_wait"] >= pairs[f"{eager}_num_arrivals"]
        sooner = (pairs[f"{eager}_wait"] < pairs[f"{eager}_num_arrivals"]) & (pairs[f"{eager}_times"] == 1)
        as_many = (pairs[f"{tardy}_times"] == updates) | (not is_text)
        pairs[f"{tardy}_waits_for_{eager}"] = same & sooner & waits_for_all & as_many
    return pairs


def _compare(
    evidence: Evidence, pairs: DataFrame, where: str, least: str = "", per: str = "high", figure: str = "anytime",
    ties: bool = False, budget: str = "",
) -> list[Comparison]:  # fmt: skip
    """Evaluate an entry of ``compare`` in ``findings.toml``, which explains the arguments."""
    chosen = pairs.query(where)
    if budget:
        chosen = chosen[chosen[f"low_{budget}"] <= NO_MORE * chosen[f"high_{budget}"]]
    rivals = dict(iter(chosen.groupby(per).low)) if least == "low_anytime" else {}
    if least:
        chosen = chosen.sort_values(least, kind="stable").drop_duplicates(per).sort_index()
    found = []
    for pair in chosen.drop_duplicates(["low_same_as", "high_same_as"]).itertuples():
        candidates = rivals.get(getattr(pair, per), ())
        for comparison in _compared(evidence, figure, pair.low, pair.high):
            comparison = replace(comparison, ties_count=ties)
            if len(candidates) > 1:
                others = [each for rank in candidates for each in _compared(evidence, figure, rank, pair.high)]
                comparison = _chosen_on_other_seeds(comparison, others)
            if budget and getattr(pair, f"low_{budget}") < getattr(pair, f"high_{budget}") / COMPARABLE:
                # A candidate that is far cheaper and loses says nothing about the budget; one that wins does.
                comparison = replace(comparison, is_matched=comparison.points > 0)
            found.append(comparison)
    return found


def _chosen_on_other_seeds(best: Comparison, candidates: Sequence[Comparison]) -> Comparison:
    """Take for each seed the candidate that is best on the others.

    The best of many by the very figures that are compared would be ahead by chance alone.
    """
    spreads = [each.low for each in candidates if each.what == best.what and each.low.num_seeds > 1]
    seeds = [seed for seed in best.low.by_seed if all(seed in each.by_seed for each in spreads)]
    if len(spreads) < 2 or len(seeds) < 2:
        return best
    values = {}
    for seed in seeds:
        means = [statistics.fmean(each.by_seed[other] for other in seeds if other != seed) for each in spreads]
        values[seed] = spreads[means.index(min(means))].by_seed[seed]
    if values == {seed: best.low.by_seed[seed] for seed in seeds}:
        return best
    low = Spread.of(values)
    assert low is not None
    return replace(best, lower=f"{best.lower}, of {len(spreads)} the best on the other seeds", low=low)


def _waits_long(run: Any) -> bool:
    """Tell whether the untrained model decides a run's sum over all arrivals; with text it does after one of them."""
    return run.first_planned > 0 if run.is_text else 2 * run.first_planned >= run.num_arrivals


def _compared(evidence: Evidence, figure: str, low: int, high: int) -> list[Comparison]:
    """Compare two experiments by a figure, where both have it.

    ``anytime``: CER or average perplexity; of learners that both wait long, which it hardly tells apart, ``final``, the
    last value. ``early``: the value in force early in the stream against the last one. ``wait``: of all its waiting
    times the one with the lowest sum over the stream, seed by seed.
    ``iid``: an i.i.d. control against its learner. ``gap``: by what share of the i.i.d. value the sequential one is
    higher, over seeds that both have. ``jump``: the largest change of the loss over all growth steps against none.
    """
    one, other, measure = evidence.groups[low], evidence.groups[high], evidence.measure
    names, found = (one.name, other.name), list[tuple[Any, ...]]()
    if figure == "anytime" and not (_waits_long(one.first) and _waits_long(other.first)):
        found = [(one.spread(figure), other.spread(figure), measure.anytime, measure.anytime_digits)]
    elif figure in ("anytime", "final"):
        found = [(one.spread("final"), other.spread("final"), measure.final, 2, measure.scale)]
    elif figure == "early":
        curve = one.arrivals[one.arrivals.arrival == evidence.early].set_index("run").curve
        curve = curve.reindex(one.complete.index)  # of runs on a stream that is shorter: nothing
        early = Spread.of({one.runs.seeds[run]: value / measure.scale for run, value in curve.items()})
        what = f"{measure.name} after t{evidence.early} against the final one"
        found = [(early, other.spread("final"), what, 2, measure.scale)]
    elif figure == "wait":
        names = (f"{one.first.variant}, {one.size}", f"{other.first.variant}, {other.size}")
        found = [(*_best_waits(evidence, low, high), "best waiting time, mega-batches", 0)]
    elif figure == "iid":
        names, what = (f"{one.name}, i.i.d.", "sequential"), f"{measure.name} after {{}} mega-batches"
        found = [(*pair, what.format(k), 2, measure.scale) for k, pair in evidence.controls[low].items()]
    elif figure == "gap":
        shared = sorted(evidence.controls[low].keys() & evidence.controls[high].keys())
        gaps = [[_share_lost(*evidence.controls[rank][k]) for rank in (low, high)] for k in shared]
        found = [(*gap, f"percent lost after {k} mega-batches", 2, 100) for k, gap in zip(shared, gaps, strict=True)]
    elif figure == "jump":
        what = "largest change of the validation loss at a growth step, nats"
        names, found = (one.name, "limit"), [(one.spread("max_jump"), Spread(SMOOTH), what, None)]
    comparisons = [Comparison(*names, *each) for each in found if None not in each[:2]]
    return [replace(each, is_exact=figure == "jump") for each in comparisons]


def _best_waits(evidence: Evidence, *best: int) -> list[Optional[Spread]]:
    """Return for each seed which waiting time has the lowest anytime value, of those that all these learners have.

    None where these are fewer than `LEAST_WAITS`.
    """
    of_learners = []
    for rank in best:
        groups = [evidence.groups[each] for each in evidence.waits[rank]]
        spreads = {each.first.wait: each.spread("anytime") for each in groups}
        of_learners.append({wait: spread.by_seed for wait, spread in spreads.items() if spread is not None})
    shared = sorted(set(of_learners[0]).intersection(*of_learners))
    if len(shared) < LEAST_WAITS:
        return [None] * len(best)
    found = []
    for values in of_learners:
        seeds = [seed for seed in values[shared[0]] if all(seed in values[wait] for wait in shared)]
        found.append(Spread.of({seed: min(shared, key=lambda wait: values[wait][seed]) for seed in seeds}))
    return found


def _share_lost(iid: Spread, sequential: Spread) -> Optional[Spread]:
    both = [seed for seed in iid.by_seed if seed in sequential.by_seed]
    return Spread.of({seed: sequential.by_seed[seed] / iid.by_seed[seed] - 1 for seed in both})
