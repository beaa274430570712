"""Findings of the paper about text and images alike: size, waiting for everything, smooth growth."""

import itertools
from typing import Optional

from fairseq_alma.report.experiment import Experiment
from fairseq_alma.report.findings.evidence import Evidence
from fairseq_alma.report.findings.finding import Comparison, Finding
from fairseq_alma.report.run_figures import RunFigures
from fairseq_alma.report.spread import Spread

SMOOTH = (
    1e-3  # nats: a change of the validation loss at a growth step that passes for none; of perplexity, a thousandth
)


def larger_is_better(evidence: Evidence) -> Finding:
    """Larger models generalise better."""
    comparisons: list[Comparison] = []
    for experiment in evidence.select(times=None):
        larger = evidence.next_larger(experiment)
        comparisons += evidence.lower(larger, experiment) if larger is not None else []
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
    pairs: list[tuple[Optional[Experiment], Optional[Experiment]]] = []
    for smaller, larger in evidence.neighbouring_sizes():
        best = evidence.best([each for each in evidence.select(size=smaller) if each.first.is_text])
        pairs += [(each, best) for each in evidence.select(size=larger)]
    pairs += [(evidence.next_larger(each), each) for each in evidence.select() if not each.first.is_text]
    comparisons: list[Comparison] = []
    for more, goal in pairs:
        if more is not None and goal is not None and more.first.planned[0] <= early:
            comparisons += evidence.lower_final(more, goal, early)
    after = "one mega-batch" if early == 0 else "a tenth of the stream"
    return Finding(
        f"Larger models are more sample efficient: after {after} they are ahead of smaller ones after all of the data.",
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
    jumps_of_copies: list[float] = []
    for experiment in evidence.select("gmoe"):
        change = experiment.spread(_largest_jump)
        if change is None:
            continue
        if experiment.first.is_text and experiment.first.options.get("grow_method") != "split":
            jumps_of_copies.append(change.mean)
        else:
            what, limit = "largest change of the validation loss at a growth step, nats", Spread.exactly(SMOOTH)
            comparisons.append(Comparison(experiment.name, "limit", change, limit, what, None))
    return Finding(
        "Growth of a tree of experts is smooth: the loss right after a split is that right before.",
        "paper v5, section 4.2 and appendix A",
        "a complete run of gMoE that splits experts",
        comparisons,
        f"Growth of a flat mixture, as by copies, changes it by up to {max(jumps_of_copies):.2g} nats."
        if jumps_of_copies
        else "",
    )


def _largest_jump(run: RunFigures) -> Optional[float]:
    """Return the largest change of the loss over all growth steps, or None without any."""
    return max(map(abs, run.growth_jumps.values()), default=None)


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
