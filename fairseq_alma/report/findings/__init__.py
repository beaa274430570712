"""The paper's findings: for each, whether a set of runs bears it out, and the numbers that decide."""

from typing import Callable, Sequence

from fairseq_alma.report.experiment import experiments
from fairseq_alma.report.findings import both_kinds, images, language
from fairseq_alma.report.findings.evidence import Evidence
from fairseq_alma.report.findings.finding import Comparison, Finding, Verdict
from fairseq_alma.report.run_figures import IMAGES, TEXT, RunFigures, experiment_of

__all__ = ["Comparison", "Finding", "Verdict", "all_findings"]

Question = Callable[[Evidence], Finding]
QUESTIONS: dict[str, tuple[Question, ...]] = {
    TEXT: (
        both_kinds.larger_is_better,
        both_kinds.larger_learns_faster,
        language.fixed_beats_growing,
        language.growing_ensemble_against_growing_mixture,
        language.ensembles_win_when_large,
        language.single_models_win_when_small,
        language.sequential_is_harder,
        language.sequential_is_harder_when_large,
        both_kinds.waiting_for_everything,
        both_kinds.growth_is_smooth,
    ),
    IMAGES: (
        images.intermediate_wait_is_best,
        images.larger_waits_less,
        both_kinds.waiting_for_everything,
        both_kinds.larger_is_better,
        both_kinds.larger_learns_faster,
        images.fixed_beats_growing_in_memory,
        images.fixed_beats_growing_in_compute,
        images.growing_ensemble_trains_cheaper,
        images.growing_beats_fixed_mixture,
        images.joint_training_helps_small_models,
        images.ensembles_win_when_large,
        images.replay_helps_at_a_cost,
        images.replay_gives_no_better_trade_off,
        both_kinds.growth_is_smooth,
    ),
}


def all_findings(runs: Sequence[RunFigures]) -> list[tuple[RunFigures, list[Finding]]]:
    """Put the paper's findings to the test.

    Args:
        runs: any; those on different streams are not compared with each other.

    Returns:
        For each stream a run on it, which says what stream it is, and the findings about its kind of data.
    """
    streams: dict[str, list[RunFigures]] = {}
    for run in runs:
        streams.setdefault(repr(experiment_of(run.stream)), []).append(run)
    found = []
    for on_stream in streams.values():
        evidence = Evidence(experiments(on_stream))
        found.append((on_stream[0], [question(evidence) for question in QUESTIONS[on_stream[0].kind]]))
    return found
