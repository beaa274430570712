"""The tables of a report, a module for each."""

from dataclasses import replace
from typing import Sequence

from fairseq_alma.report.experiment import experiments
from fairseq_alma.report.run_figures import IMAGES, TEXT, RunFigures
from fairseq_alma.report.table import Table
from fairseq_alma.report.tables.beside_paper import paper_controls, paper_perplexities
from fairseq_alma.report.tables.growth import growth_table
from fairseq_alma.report.tables.iid import iid_table
from fairseq_alma.report.tables.per_arrival import arrival_table
from fairseq_alma.report.tables.seeds import seed_table
from fairseq_alma.report.tables.summary import summary_table

__all__ = ["all_tables"]


def all_tables(runs: Sequence[RunFigures], paper: bool = False) -> list[Table]:
    """Return every table that the runs allow; text and images have tables of their own.

    Args:
        runs: any.
        paper: set the paper's own numbers beside those of the runs.
    """
    tables: dict[str, Table] = {}
    for kind in (TEXT, IMAGES):
        of_kind = [run for run in runs if run.kind == kind]
        if not of_kind:
            continue
        groups = experiments(of_kind)
        found = [arrival_table(of_kind, groups), summary_table(groups), seed_table(groups), iid_table(groups)]
        found.append(growth_table(of_kind, groups))
        if paper and kind == TEXT:
            found += [paper_perplexities(groups), paper_controls(groups)]
        for table in found:
            name = table.name if table.name not in tables else f"{table.name}_{kind}"
            if table.rows:
                tables[name] = replace(table, name=name)
    return list(tables.values())
