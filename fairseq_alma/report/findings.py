"""The paper's findings: for each, whether a set of runs bears it out, and the numbers that decide.

What they are stands in ``findings.toml``; here are the pairs of experiments that they choose from, and the figures.
"""

import functools
import math
import statistics
import tomllib
from collections import ChainMap, defaultdict
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, Mapping, Optional, Sequence

from pandas import concat

from fairseq_alma.report.experiment import Experiment, experiments, sizes_in_order
from fairseq_alma.report.finding import Comparison, Finding, Spread
from fairseq_alma.report.read_run import RunTable
from fairseq_alma.report.spelling import TEXT
from fairseq_alma.report.tables import MEASURES, Measure, controls, regret_finding

COMPARABLE = 2.0  # factor between two budgets at which who gets less out of the smaller one has shown something
NO_MORE = 1.02  # factor by which a budget may be exceeded: the gates of a mixture cost that little
SMOOTH = 1e-3  # nats: a change of the validation loss by growth that passes for none; of perplexity, a thousandth
GROWING = ("gmoe", "firefly", "gens")
LEAST_WAITS = 3  # waiting times from which the best one is told
ALIKE = ["backbone", "variant", "gate", "num_experts_given", "num_arrivals"]
"""What experiments share that differ by their waiting times."""
SHARED = ("backbone", "wait", "label", "experts", "variant", "gate", "num_experts_given", "num_arrivals")
"""What of two experiments may be the same."""
Pair = ChainMap[str, Any]


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


def _facts(evidence: Evidence) -> list[dict[str, Any]]:
    """Return for each experiment what conditions in ``findings.toml`` may ask for, as ``low_...``, ``high_...``.

    ``rank`` is that of the backbone's size among complete runs; ``smallest`` and ``largest`` are there of several
    sizes only. ``num_params``, ``anytime``, ``memory`` and ``computation`` are means over seeds, other facts those of
    the furthest run.
    """
    groups = evidence.groups
    counting = [each.complete for each in groups if _counts(each)]
    ranks = {size: rank for rank, size in enumerate(sizes_in_order(concat(counting)) if counting else [])}
    found, known = [], list[Any]()
    for number, each in enumerate(groups):
        run, counts = each.first, _counts(each)
        spreads = {fact: each.spread(fact) for fact in ("num_params", "anytime", "memory", "computation")}
        # A gEns that waits for everything is the SM that does, figure by figure, and would count twice.
        told = [frozenset(spread.by_seed.items()) for spread in (spreads["anytime"], each.spread("final")) if spread]
        known.append([run.num_arrivals, *told] if told else number)
        is_vote = run.options.get("combine") == "vote" and run.learner == "ens"
        rank = ranks.get(run.backbone, math.nan)
        found.append(
            run._asdict()
            | {fact: math.nan if spread is None else spread.mean for fact, spread in spreads.items()}
            | {
                "learner": "vote" if is_vote else run.learner,  # of the models of an Ens, which counts in its place
                "gate": _gate(run.train_options), "num_experts_given": str(run.train_options.get("--num-experts", "")),
                "label": each.label, "times": each.times, "same_as": known.index(known[-1]), "counts": counts,
                "rank": rank, "smallest": len(ranks) > 1 and rank == 0,
                "largest": len(ranks) > 1 and rank == len(ranks) - 1, "has_control": number in evidence.controls,
                "splits": run.learner == "gmoe" and not _copies(each), "wait_place": "", "is_best_wait": False,
                # One that would grow, and waits for so long that it never does, has not shown what growth is worth.
                "grows_if_it_can": run.learner not in GROWING or run.min_params < run.max_params,
            }
        )  # fmt: skip
    _compare_waits(found, evidence)
    return found


def _compare_waits(found: Sequence[dict[str, Any]], evidence: Evidence) -> None:
    """Note which of the waiting times of a learner is the shortest, the longest, and the best one."""
    kin: dict[tuple[Any, ...], dict[int, int]] = defaultdict(dict)  # by what they share: waiting time -> experiment
    for number, each in enumerate(found):
        # The sum over the stream of who waits for all of it is that of the untrained model, and tells nothing.
        if each["counts"] and each["wait"] < each["num_arrivals"] and not each["replay"] and each["times"] == 1:
            kin[tuple(each[name] for name in ALIKE)].setdefault(each["wait"], number)
    for waits in kin.values():
        for wait, number in waits.items():
            found[number]["wait_place"] = {max(waits): "most", min(waits): "least"}.get(wait, "middle")
        values = [(found[number]["anytime"], place, number) for place, number in enumerate(waits.values())]
        known = [each for each in values if not math.isnan(each[0])]
        if known:
            best = min(known)[2]
            found[best]["is_best_wait"] = len(waits) > 1
            evidence.waits[best] = list(waits.values())


def _pairs(evidence: Evidence) -> list[Pair]:
    """Return all pairs of experiments: facts and numbers (``low``, ``high``) of both, and what they have in common.

    ``usual_steps``: with as many updates in a stage as the fewest that a backbone has; ``plain``: also without replay;
    ``alike``: also of one size and waiting time; ``twins``: the same learner with as many experts.
    """
    facts, is_text = _facts(evidence), evidence.measure.per == "token"
    lows, highs = (
        [{side: number, **{f"{side}_{name}": fact for name, fact in each.items()}} for number, each in enumerate(facts)]
        for side in ("low", "high")
    )
    return [
        ChainMap(_in_common(facts[low["low"]], facts[high["high"]], is_text), low, high, {"early": evidence.early})
        for high in highs
        for low in lows
    ]


def _in_common(low: Mapping[str, Any], high: Mapping[str, Any], is_text: bool) -> dict[str, Any]:
    same = {name: low[name] == high[name] for name in SHARED}
    gate = same["gate"] or "" in (low["gate"], high["gate"])
    length = same["num_arrivals"]  # else sums over the stream do not compare
    counts = low["counts"] and high["counts"] and gate and length
    without_replay = counts and not low["replay"] and not high["replay"]
    usual_steps = counts and low["times"] == high["times"] == 1
    plain = usual_steps and without_replay
    fewest, most = sorted((low["num_params"], high["num_params"]))
    # Who waits for all makes as many updates; it is held against every waiting time that is shorter than the stream.
    may_wait = without_replay and same["variant"] and same["backbone"] and same["experts"]
    return {
        "is_text": is_text, "same_variant": same["variant"], "same_size": same["backbone"], "same_wait": same["wait"],
        "same_but_wait_and_size": same["variant"] and same["num_experts_given"] and gate and length,
        "twins": same["label"] and same["variant"] and same["experts"], "usual_steps": usual_steps,
        "without_replay": without_replay, "plain": plain, "alike": plain and same["backbone"] and same["wait"],
        "grow_if_they_can": plain and same["wait"] and low["grows_if_it_can"] and high["grows_if_it_can"],
        "ratio": most / fewest if fewest else math.nan,
        "grown_from_low": (low["learner"], high["learner"]) in (("sm", "gmoe"), ("ens", "gens")),
        "low_waits_for_high": may_wait and _waits_for(low, high, is_text),
        "high_waits_for_low": may_wait and _waits_for(high, low, is_text),
    }  # fmt: skip


def _waits_for(tardy: Mapping[str, Any], eager: Mapping[str, Any], is_text: bool) -> bool:
    """Tell whether one waits for all of the stream, with as many updates (of text) as the other, which does not."""
    as_many = not is_text or tardy["times"] == eager["times"] * eager["num_planned"]
    return eager["wait"] < eager["num_arrivals"] <= tardy["wait"] and eager["times"] == 1 and as_many


def _compare(
    evidence: Evidence, pairs: Sequence[Pair], where: str, least: str = "", per: str = "high", figure: str = "anytime",
    ties: bool = False, budget: str = "",
) -> list[Comparison]:  # fmt: skip
    """Evaluate an entry of ``compare`` in ``findings.toml``, which explains the arguments."""
    code = compile(where, "findings.toml", "eval")  # a file of this package
    chosen = [pair for pair in pairs if eval(code, {}, pair)]
    if budget:
        chosen = [pair for pair in chosen if pair[f"low_{budget}"] <= NO_MORE * pair[f"high_{budget}"]]
    rivals: dict[int, list[int]] = defaultdict(list)
    for pair in chosen:
        rivals[pair[per]].append(pair["low"])
    if least:
        ordered = sorted(chosen, key=lambda pair: (math.isnan(pair[least]), pair[least]))
        firsts = {pair[per]: (pair["low"], pair["high"]) for pair in reversed(ordered)}
        chosen = [pair for pair in chosen if firsts[pair[per]] == (pair["low"], pair["high"])]
    found = []
    distinct: dict[Any, Pair] = {}
    for pair in chosen:
        distinct.setdefault((pair["low_same_as"], pair["high_same_as"]), pair)
    for pair in distinct.values():
        for comparison in _compared(evidence, figure, pair["low"], pair["high"]):
            comparison = replace(comparison, ties_count=ties)
            if least == "low_anytime" and len(rivals[pair[per]]) > 1:
                others = [each for low in rivals[pair[per]] for each in _compared(evidence, figure, low, pair["high"])]
                comparison = _chosen_on_other_seeds(comparison, others)
            if budget and pair[f"low_{budget}"] < pair[f"high_{budget}"] / COMPARABLE:
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
