"""Which of the backbones in a report is the larger one."""

from typing import Sequence

from fairseq_alma.report.run_figures import RunFigures

SINGLE = "sm"


def sizes_in_order(runs: Sequence[RunFigures]) -> list[str]:
    """Return the sizes of backbone from the smallest to the largest; those of runs without an update come first.

    By the parameters of their smallest single models, where each size has one; else of their smallest models.
    """
    singles: dict[str, int] = {}
    smallest: dict[str, int] = {}
    for run in runs:
        params = min(run.num_params.values(), default=None)
        if params is None:
            continue
        smallest[run.size] = min(params, smallest.get(run.size, params))
        if run.learner == SINGLE:
            singles[run.size] = min(params, singles.get(run.size, params))
    chosen = singles if singles.keys() == smallest.keys() else smallest
    unknown = sorted({run.size for run in runs} - chosen.keys())
    return [*unknown, *sorted(chosen, key=lambda size: chosen[size])]
