"""What the paper found with language models: section 6.2, Figure 5, Tables 1 and 2."""

from typing import Optional

from fairseq_alma.report.experiment import Experiment
from fairseq_alma.report.findings.evidence import ABOUT_EQUAL, Evidence, final_params
from fairseq_alma.report.findings.finding import Comparison, Finding
from fairseq_alma.report.spread import Spread
from fairseq_alma.report.tables.iid import Control, controls

SOURCE = "paper v5, section 6.2"
WELL_BELOW = 1.1  # factor; the gates of a mixture that grew by splits make it that little larger than a fixed one
# A growing learner, and the fixed one that is made of the same parts.
FIXED_TWIN = {"gmoe": "sm", "gens": "ens"}


def fixed_beats_growing(evidence: Evidence) -> Finding:
    """Starting with an intermediate capacity beats growing to more."""
    comparisons: list[Comparison] = []
    for growing in evidence.select(*FIXED_TWIN):
        sizes = list(growing.first.num_params.values())
        for fixed in evidence.select(FIXED_TWIN[growing.first.learner], size=growing.first.size):
            if fixed.first.wait == growing.first.wait and min(sizes) < final_params(fixed) < max(sizes) / WELL_BELOW:
                comparisons += evidence.lower(fixed, growing)
    return Finding(
        "Growing does not improve: a fixed model of intermediate size has the lower average perplexity.",
        f"{SOURCE}, Figure 5",
        "gMoE beside an SM, or gEns beside an Ens, of a size between its first and its last",
        comparisons,
    )


def growing_ensemble_against_growing_mixture(evidence: Evidence) -> Finding:
    """With large models gEns is ahead of gMoE at the same compute, with small ones it is level."""
    comparisons: list[Comparison] = []
    for size in evidence.sizes:
        is_large = len(evidence.sizes) > 1 and size == evidence.sizes[-1]
        for ensemble in evidence.select("gens", size=size):
            for mixture in evidence.select("gmoe", size=size):
                if ensemble.first.wait == mixture.first.wait:
                    comparisons += evidence.lower(ensemble, mixture, ties_count=not is_large)
    return Finding(
        "Of the growing learners gEns is ahead of gMoE for the same compute, in small models at least level.",
        SOURCE,
        "gEns and gMoE with the same waiting time and backbone",
        comparisons,
    )


def ensembles_win_when_large(evidence: Evidence) -> Finding:
    """In the larger setting Ens beats SM of as many parameters, if there are several settings."""
    comparisons: list[Comparison] = []
    if len(evidence.sizes) > 1:
        for ensemble, single in _about_equal(evidence, evidence.sizes[-1]):
            comparisons += evidence.lower(ensemble, single)
    return Finding(
        "Ensembles perform best with large models: Ens is ahead of SM of about as many parameters.",
        f"{SOURCE}, Table 2",
        "Ens and SM with the same waiting time and about as many parameters, over two sizes of backbone",
        comparisons,
    )


def single_models_win_when_small(evidence: Evidence) -> Finding:
    """In the base setting SM with more experts beats Ens."""
    comparisons: list[Comparison] = []
    if len(evidence.sizes) > 1:
        for ensemble, single in _about_equal(evidence, evidence.sizes[0]):
            comparisons += evidence.lower(single, ensemble)
    return Finding(
        "With small models it is the other way round: SM is ahead of Ens of about as many parameters.",
        f"{SOURCE}, Table 2",
        "Ens and SM of about as many parameters, and two sizes of backbone to tell the small one",
        comparisons,
    )


def sequential_is_harder(evidence: Evidence) -> Finding:
    """I.i.d. training on the same data with the same updates ends better."""
    comparisons: list[Comparison] = []
    for control in controls(evidence.groups):
        for k in sorted(control.iid):
            pair = control.pair(k)
            if pair is not None:
                name = control.sequential.name
                what = f"{evidence.measure.name} after {k} mega-batches"
                comparisons.append(Comparison(f"{name}, i.i.d.", "sequential", *pair, what, 2, evidence.measure.scale))
    return Finding(
        "Learning sequentially is harder than learning from the same data at once.",
        f"{SOURCE}, Table 1",
        "a learner that waits for nothing and its control, alma-stream --iid K",
        comparisons,
    )


def sequential_is_harder_when_large(evidence: Evidence) -> Finding:
    """The gap between sequential and i.i.d. training is wider for the larger model."""
    comparisons: list[Comparison] = []
    found = controls(evidence.groups)
    for smaller, larger in evidence.neighbouring_sizes():
        for small in found:
            twins = (each for each in found if _is_twin(each.sequential, small.sequential, larger))
            large = next(twins, None)
            if large is None or small.sequential.first.size != smaller:
                continue
            for k in sorted(small.iid.keys() & large.iid.keys()):
                low, high = _gap(small, k), _gap(large, k)
                if low is not None and high is not None:
                    names = small.sequential.name, large.sequential.name
                    comparisons.append(
                        Comparison(*names, low, high, f"percent lost after {k} mega-batches", digits=2, scale=100)
                    )
    return Finding(
        "The larger the model, the more it loses by learning sequentially.",
        f"{SOURCE}, Table 1",
        "the same learner with its i.i.d. control (--iid K) over two sizes of backbone",
        comparisons,
    )


def _about_equal(evidence: Evidence, size: Optional[str]) -> list[tuple[Experiment, Experiment]]:
    """Pair each Ens with the SM of the same waiting time that is nearest to it in parameters."""
    pairs = []
    for ensemble in evidence.select("ens", size=size):
        singles = [each for each in evidence.select("sm", size=size) if each.first.wait == ensemble.first.wait]
        ratios = [(max(a, b) / min(a, b), each) for each in singles for a, b in [_params(ensemble, each)]]
        near = [(ratio, index) for index, (ratio, _) in enumerate(ratios) if ratio <= ABOUT_EQUAL]
        if near:
            pairs.append((ensemble, ratios[min(near)[1]][1]))
    return pairs


def _params(one: Experiment, other: Experiment) -> tuple[float, float]:
    return final_params(one), final_params(other)


def _is_twin(one: Experiment, other: Experiment, size: str) -> bool:
    run, twin = one.first, other.first
    return (run.size, one.label, run.experts) == (size, other.label, twin.experts)


def _gap(control: Control, k: int) -> Optional[Spread]:
    """Return by what share of the i.i.d. value the sequential one is higher, over seeds that both have."""
    pair = control.pair(k)
    if pair is None:
        return None
    iid, sequential = pair
    shared = {
        seed: sequential.by_seed[seed] / value - 1 for seed, value in iid.by_seed.items() if seed in sequential.by_seed
    }
    return Spread.of(shared)
