"""What the paper found with classifiers of images: section 6.1, Figures 2 to 4 and 7; of v1, section 5.2."""

import math
from typing import Iterator, Optional

from fairseq_alma.report.experiment import Experiment
from fairseq_alma.report.findings.evidence import Budget, Evidence, computation, memory
from fairseq_alma.report.findings.finding import Comparison, Finding
from fairseq_alma.report.spread import Spread

SOURCE = "paper v5, section 6.1"
GROWING = ("gmoe", "firefly", "gens")


def intermediate_wait_is_best(evidence: Evidence) -> Finding:
    """Neither updating at once nor waiting for everything has the lowest CER; for small models at least."""
    comparisons: list[Comparison] = []
    for waits in _waits(evidence, evidence.sizes[0] if evidence.sizes else None):
        if len(waits) > 2:
            best = evidence.best(waits[1:-1])
            if best is not None:
                comparisons += [*evidence.lower(best, waits[0]), *evidence.lower(best, waits[-1])]
    return Finding(
        "An intermediate waiting time has the lowest CER; on MNIST in small models alone, which are looked at here.",
        f"{SOURCE}, Figures 2, 3 and 7",
        "one learner with three waiting times or more, without replay",
        comparisons,
    )


def larger_waits_less(evidence: Evidence) -> Finding:
    """The larger the model, the shorter the best waiting time."""
    comparisons: list[Comparison] = []
    if len(evidence.sizes) > 1:
        small, large = (
            {waits[0].first.learner: waits for waits in _waits(evidence, size) if len(waits) > 1}
            for size in (evidence.sizes[0], evidence.sizes[-1])
        )
        for learner in sorted(small.keys() & large.keys()):
            best = [evidence.best(waits[learner]) for waits in (large, small)]
            if best[0] is not None and best[1] is not None:
                spreads = [Spread(each.first.wait, math.nan, {None: each.first.wait}) for each in best if each]
                names = [each.name for each in best if each]
                what = "best waiting time, mega-batches"
                comparisons.append(Comparison(names[0], names[1], spreads[0], spreads[1], what, 0))
    return Finding(
        "Smaller waiting times are better for larger models.",
        f"{SOURCE}, Figure 3 (MNIST)",
        "one learner with two waiting times or more over two sizes of backbone",
        comparisons,
    )


def fixed_beats_growing_in_memory(evidence: Evidence) -> Finding:
    """For a fixed memory SM beats gMoE and FF, and Ens beats gEns."""
    return Finding(
        "For a given memory it is better to start large than to grow: SM beats gMoE and FF, Ens beats gEns.",
        f"{SOURCE}, Figure 2",
        "gMoE, FF or gEns, and SM or Ens with no larger Mem and the same waiting time",
        [*_against_growing(evidence, memory, "sm", ("gmoe", "firefly")),
         *_against_growing(evidence, memory, "ens", ("gens",))],
    )  # fmt: skip


def fixed_beats_growing_in_compute(evidence: Evidence) -> Finding:
    """For a fixed computation SM beats gMoE and FF."""
    return Finding(
        "For a given training compute it is better to start large than to grow: SM beats gMoE and FF.",
        f"{SOURCE}, Figure 2",
        "gMoE or FF, and SM with no larger Comp and the same waiting time",
        _against_growing(evidence, computation, "sm", ("gmoe", "firefly")),
    )


def growing_ensemble_trains_cheaper(evidence: Evidence) -> Finding:
    """For a fixed training compute gEns beats Ens."""
    return Finding(
        "For a given training compute, though not for a given memory, gEns beats Ens.",
        f"{SOURCE}, Figure 2",
        "Ens, and gEns with no larger Comp and the same waiting time",
        _against_growing(evidence, computation, "gens", ("ens",)),
    )


def growing_beats_fixed_mixture(evidence: Evidence) -> Finding:
    """GMoE beats the MoE that it starts as."""
    comparisons: list[Comparison] = []
    for fixed, growing in _same_wait(evidence, "moe", "gmoe"):
        if min(growing.first.num_experts.values()) == min(fixed.first.num_experts.values()):
            comparisons += evidence.lower(growing, fixed)
    return Finding(
        "A mixture that grows beats one that keeps the number of experts that both start with.",
        "paper v1, section 5.2 and Figure 5",
        "MoE, and gMoE that starts with as many experts, with the same waiting time",
        comparisons,
    )


def replay_gives_no_better_trade_off(evidence: Evidence) -> Finding:
    """For the compute that replay costs, the same learner without it gets as far."""
    comparisons: list[Comparison] = []
    for replay in evidence.select(replay=True):
        without = evidence.select(replay.first.learner)
        comparisons += evidence.within_budget(without, replay, computation, ties_count=True)
    return Finding(
        "Replay gives no better trade-off: for its compute, the same learner without it reaches at least as low a CER.",
        f"{SOURCE}, Figure 4",
        "one learner with replay, and without it for no more compute (a larger backbone, another waiting time)",
        comparisons,
    )


def replay_helps_at_a_cost(evidence: Evidence) -> Finding:
    """With replay the same learner gets lower, for more compute."""
    comparisons: list[Comparison] = []
    for replay in evidence.select(replay=True):
        for plain in evidence.select(replay.first.learner, size=replay.first.size):
            if plain.first.wait == replay.first.wait:
                comparisons += evidence.lower(replay, plain)
    return Finding(
        "Replay lowers the CER of a learner, at the expense of compute.",
        f"{SOURCE}, Figure 4",
        "one learner with the same waiting time and backbone, with replay and without",
        comparisons,
    )


def joint_training_helps_small_models(evidence: Evidence) -> Finding:
    """UMix is ahead of Ens with the smallest models, behind with the largest."""
    comparisons: list[Comparison] = []
    if len(evidence.sizes) > 1:
        for joint, ensemble in _same_wait(evidence, "umix", "ens"):
            if joint.first.size == evidence.sizes[0]:
                comparisons += evidence.lower(joint, ensemble)
            if joint.first.size == evidence.sizes[-1]:
                comparisons += evidence.lower(ensemble, joint)
    return Finding(
        "The operating point matters: UMix is ahead of Ens with small models, Ens is with large ones.",
        SOURCE,
        "UMix and Ens with the same waiting time, over two sizes of backbone",
        comparisons,
    )


def ensembles_win_when_large(evidence: Evidence) -> Finding:
    """Ens has the lowest CER of all learners over the largest backbone, if there are several."""
    comparisons: list[Comparison] = []
    largest = evidence.sizes[-1] if len(evidence.sizes) > 1 else None
    for learner in sorted({each.first.learner for each in evidence.complete} - {"ens", "bagging"}):
        for ensemble, other in _same_wait(evidence, "ens", learner):
            if ensemble.first.size == largest:
                comparisons += evidence.lower(ensemble, other)
    return Finding(
        "Ens is the best learner with large models.",
        SOURCE,
        "Ens and other learners with the same waiting time, over two sizes of backbone",
        comparisons,
    )


def _waits(evidence: Evidence, size: Optional[str]) -> Iterator[list[Experiment]]:
    """Yield each learner's experiments over a backbone, without replay, by waiting time."""
    chosen = evidence.select(size=size)
    for learner in sorted({each.first.learner for each in chosen}):
        by_wait = {each.first.wait: each for each in reversed(chosen) if each.first.learner == learner}
        yield [by_wait[wait] for wait in sorted(by_wait)]


def _same_wait(evidence: Evidence, one: str, other: str) -> Iterator[tuple[Experiment, Experiment]]:
    """Yield the pairs of two learners that share waiting time and backbone, without replay."""
    for each in evidence.select(one):
        for against in evidence.select(other, size=each.first.size):
            if against.first.wait == each.first.wait:
                yield each, against


def _against_growing(evidence: Evidence, budget: Budget, winner: str, losers: tuple[str, ...]) -> list[Comparison]:
    """Compare each loser with the best winner of the same waiting time that costs no more, over any backbone.

    A learner that would grow, and waits for so long that it never does, has not shown what growth is worth.
    """
    comparisons: list[Comparison] = []
    for loser in filter(_grows_if_it_can, evidence.select(*losers)):
        candidates = [each for each in evidence.select(winner) if each.first.wait == loser.first.wait]
        candidates = list(filter(_grows_if_it_can, candidates))
        comparisons += evidence.within_budget(candidates, loser, budget)
    return comparisons


def _grows_if_it_can(experiment: Experiment) -> bool:
    run = experiment.first
    return run.learner not in GROWING or len(set(run.num_params.values())) > 1
