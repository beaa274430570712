"""The paper's own numbers beside those of runs with the same learners, for language: its Tables 1 and 2.

Its perplexities are of models and texts of another scale; what compares is the ratio to one learner of each: the single
model with the fewest experts.
"""

import math
from typing import Mapping, Optional, Sequence

from fairseq_alma.metrics import anytime
from fairseq_alma.metrics.table import show_count, show_number
from fairseq_alma.report.experiment import Experiment
from fairseq_alma.report.measure import MEASURES
from fairseq_alma.report.paper_numbers import CITATION, PaperRow, table1, table2
from fairseq_alma.report.run_figures import TEXT
from fairseq_alma.report.sizes import sizes_in_order
from fairseq_alma.report.spread import Spread
from fairseq_alma.report.table import NOTHING, Table, TableCell, name_cell, number_cell
from fairseq_alma.report.tables.iid import controls

PAPER_SIZES = ("base", "large")
REFERENCE = ("SM_w1", "4")
NOTES = (
    f"Paper: {CITATION}, Table 2, test perplexity after each of its four mega-batches. Ours: test perplexity after the "
    "last update of the same learner with as many experts and steps, mean ± standard deviation over seeds. The paper's "
    "texts and models are of another scale, so compare the columns 'of SM_w1': the final perplexity divided by that of "
    "SM_w1 with 4 experts. "
)
CONTROL_NOTES = f"Paper: {CITATION}, Table 1. Test perplexity after k mega-batches, i.i.d. and sequential. "


def paper_perplexities(groups: Sequence[Experiment]) -> Table:
    """Lay out the paper's Table 2 beside what the experiments came to, for the sizes and learners that both have."""
    measure, sizes = MEASURES[TEXT], _paper_sizes(groups)
    ours = {_key(experiment, sizes): experiment for experiment in groups if experiment.first.size in sizes}
    theirs = {(row.size, row.learner, row.experts): row for row in table2()}
    rows: list[list[TableCell]] = []
    matched = any(key in ours for key in theirs)
    for key, row in theirs.items():
        if not matched or row.size not in sizes.values():
            continue
        final = _final(ours.get(key))
        paper_share = row.final / theirs[row.size, *REFERENCE].final
        our_reference = _final(ours.get((row.size, *REFERENCE)))
        our_share = final.mean / our_reference.mean if final and our_reference else math.nan
        paper_cells = [number_cell(show_number(ppl, 2), ppl) for ppl in row.ppl]
        our_cells = [NOTHING if final is None else number_cell(measure.show_spread(final), final.mean)]
        shares = [number_cell(show_number(share, 3), share) for share in (paper_share, our_share)]
        params = [_params(row), _our_params(ours.get(key))]
        rows.append([*map(name_cell, key), params[0], *paper_cells, params[1], *our_cells, *shares])
    header = ["size", "learner", "experts", "paper |θ|", *(f"paper t{t}" for t in range(4)), "our |θ|", "our final PPL"]
    header += ["paper, of SM_w1", "ours, of SM_w1"]
    return Table("paper", "Beside the paper's Table 2", header, rows, NOTES + _say(sizes), 3)


def paper_controls(groups: Sequence[Experiment]) -> Table:
    """Lay out the paper's Table 1 beside the controls of the experiments."""
    sizes, measure = _paper_sizes(groups), MEASURES[TEXT]
    header = [
        "size",
        "learner",
        "experts",
        "k",
        "paper iid",
        "paper seq.",
        "paper gap",
        "our iid",
        "our seq.",
        "our gap",
    ]
    rows: list[list[TableCell]] = []
    for control in controls(groups):
        run = control.sequential.first
        for row in table1():
            if (row.size, row.learner, row.experts) != (sizes.get(run.size), run.name, run.experts):
                continue
            for k in sorted(control.iid.keys() & row.iid.keys()):
                pair = control.pair(k)
                if pair is None:
                    continue
                gaps = [row.sequential[k] / row.iid[k] - 1, pair[1].mean / pair[0].mean - 1]
                names = [row.size, row.learner, row.experts, f"{k}"]
                theirs = [number_cell(show_number(value, 2), value) for value in (row.iid[k], row.sequential[k])]
                ours = [number_cell(measure.show_spread(spread), spread.mean) for spread in pair]
                shown = [number_cell(f"{gap:+.1%}", gap) for gap in gaps]
                rows.append([*map(name_cell, names), *theirs, shown[0], *ours, shown[1]])
    notes = CONTROL_NOTES + _say(sizes)
    return Table("paper_iid", "Beside the paper's Table 1", header, rows, notes, 4)


def _paper_sizes(groups: Sequence[Experiment]) -> dict[str, str]:
    """Return the paper's size that each of ours stands for: the smallest for base, the next one for large."""
    return dict(zip(sizes_in_order([experiment.first for experiment in groups]), PAPER_SIZES, strict=False))


def _say(sizes: Mapping[str, str]) -> str:
    return "; ".join(f"{theirs}: ours is {ours or 'the default size'}" for ours, theirs in sizes.items()) + "."


def _key(experiment: Experiment, sizes: Mapping[str, str]) -> tuple[str, str, str]:
    """Return size, learner and experts as the paper names them."""
    return sizes[experiment.first.size], experiment.label, experiment.first.experts


def _final(experiment: Optional[Experiment]) -> Optional[Spread]:
    return None if experiment is None else experiment.spread(lambda run: run.final)


def _params(row: PaperRow) -> TableCell:
    first, last = row.num_params[0], row.num_params[-1]
    text = show_count(last) if first == last else f"{show_count(first)} to {show_count(last)}"
    return number_cell(text, last)


def _our_params(experiment: Optional[Experiment]) -> TableCell:
    params = None if experiment is None else anytime.final(experiment.first.num_params)
    return NOTHING if params is None else number_cell(show_count(params), params)
