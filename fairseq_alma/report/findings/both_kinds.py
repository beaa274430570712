"""Findings of the paper about text and images alike: size, waiting for everything, smooth growth."""

import itertools
from typing import Mapping, Optional

from fairseq_alma.report.experiment import Experiment
from fairseq_alma.report.findings.evidence import Evidence
from fairseq_alma.report.findings.finding import Comparison, Finding
from fairseq_alma.report.spread import Spread

SMOOTH = 1e-3  # a relative change of the validation value at a growth step that passes for none


def larger_is_better(evidence: Evidence) -> Finding:
    """Larger models generalise better."""
    comparisons: list[Comparison] = []
    for smaller, larger in evidence.neighbouring_sizes():
        for experiment in evidence.select(size=smaller, times=None):
            other = evidence.same_at(experiment, larger)
            comparisons += evidence.lower(other, experiment) if other is not None else []
    for size in evidence.sizes:
        singles = sorted(evidence.select("sm", "moe", size=size), key=_experts)
        for fewer, more in itertools.pairwise(singles):
            if _experts(fewer) < _experts(more) and fewer.first.wait == more.first.wait:
                comparisons += evidence.lower(more, fewer)
    return Finding(
        f"Larger models are better: a larger backbone, or more experts, has the lower {evidence.measure.anytime}.",
        "paper v5, sections 6.1 and 6.2",
        "complete runs of one learner with two sizes of backbone or two numbers of experts",
        comparisons,
    )


def larger_learns_faster(evidence: Evidence) -> Finding:
    """Larger models learn more from less data: of text than all smaller ones, of images than the same learner."""
    early = max(0, evidence.num_arrivals // 10 - 1)
    comparisons: list[Comparison] = []
    for smaller, larger in evidence.neighbouring_sizes():
        best = evidence.best(evidence.select(size=smaller))
        for experiment in evidence.select(size=larger):
            goal = best if experiment.first.is_text else evidence.same_at(experiment, smaller)
            if goal is not None and experiment.first.planned[0] <= early:
                comparisons += evidence.lower_final(experiment, goal, early)
    after = "one mega-batch" if early == 0 else "a tenth of the stream"
    return Finding(
        f"Larger models are more sample efficient: after {after} they are ahead of smaller ones after all of it.",
        "paper v5, sections 6.1 and 6.2",
        f"complete runs with two sizes of backbone, the larger one updated within {after}",
        comparisons,
    )


def waiting_for_everything(evidence: Evidence) -> Finding:
    """Who waits for all data ends best and has the worst anytime performance."""
    comparisons: list[Comparison] = []
    for eager in evidence.select():
        if eager.first.wait != 1:
            continue
        tardy = _tardy_twin(evidence, eager)
        if tardy is not None:
            comparisons += [*evidence.lower_final(tardy, eager), *evidence.lower(eager, tardy)]
    return Finding(
        "Waiting for all data ends best and is worst until then: the lowest final value, the highest "
        f"{evidence.measure.anytime}.",
        "paper v5, section 1 and Figure 1; paper v1, section 5.1",
        "complete runs of one learner that waits for nothing and for everything, with as many updates in all",
        comparisons,
    )


def growth_is_smooth(evidence: Evidence) -> Finding:
    """Splitting an expert changes no loss."""
    comparisons: list[Comparison] = []
    for experiment in evidence.select("gmoe"):
        if experiment.first.is_text and experiment.first.options.get("grow_method") != "split":
            continue
        change = Spread.of({run.seeds: _largest_change(run.before_growth, run.grown) for run in experiment.complete})
        if change is not None:
            what, limit = "largest change at a growth step, percent", Spread.exactly(SMOOTH)
            comparisons.append(Comparison(experiment.name, "limit", change, limit, what, 2, 100))
    return Finding(
        "Growth of a tree of experts is smooth: the loss right after a split is that right before.",
        "paper v5, section 4.2 and appendix A",
        "a complete run of gMoE that splits experts",
        comparisons,
    )


def _largest_change(before: Mapping[int, float], after: Mapping[int, float]) -> Optional[float]:
    """Return the largest relative change over all growth steps, or None without any."""
    return max((abs(after[arrival] / value - 1) for arrival, value in before.items() if value), default=None)


def _experts(experiment: Experiment) -> tuple[int, int]:
    """Sort by waiting time, then experts."""
    return experiment.first.wait, max(experiment.first.num_experts.values(), default=0)


def _tardy_twin(evidence: Evidence, eager: Experiment) -> Optional[Experiment]:
    """Return the same learner that waits for the whole stream and makes as many updates in all."""
    run = eager.first
    for each in evidence.select(run.learner, size=run.size, times=None):
        waits_for_all = each.first.wait >= run.num_arrivals
        as_many = each.times == run.num_arrivals * eager.times or not run.is_text
        if waits_for_all and as_many and each.first.experts == run.experts:
            return each
    return None
