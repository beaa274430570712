"""Which of the backbones in a report is the larger one."""

from typing import Sequence

from fairseq_alma.report.experiment import Experiment

SINGLE = "sm"


def sizes_in_order(groups: Sequence[Experiment]) -> list[str]:
    """Return the sizes of backbone from the smallest to the largest.

    By the parameters of their smallest single models, where each size has one; else of their smallest models.
    """
    singles: dict[str, int] = {}
    smallest: dict[str, int] = {}
    for experiment in groups:
        run = experiment.first
        if not run.num_params:
            continue
        params = min(run.num_params.values())
        smallest[run.size] = min(params, smallest.get(run.size, params))
        if run.learner == SINGLE:
            singles[run.size] = min(params, singles.get(run.size, params))
    chosen = singles if singles.keys() == smallest.keys() else smallest
    return sorted(chosen, key=lambda size: chosen[size])
