"""The paper's Tables 1 and 2 (arXiv:2106.09563v5) next to the results of runs on text."""

import functools
import json
from importlib import resources
from typing import Any, Sequence

from fairseq_alma.report.experiment import Experiment, by_size, iid_pairs
from fairseq_alma.report.table import NOTHING, Cell, Row, Table, number, spread

SIZES = ("base", "large")
REFERENCE = ("SM_w1", "4")


@functools.cache
def paper_tables() -> dict[str, Any]:
    """Return ``paper_tables.json``; its key ``units`` gives the units."""
    tables: dict[str, Any] = json.loads(resources.files(__package__).joinpath("paper_tables.json").read_bytes())
    return tables


def final(row: dict[str, Any]) -> float:
    """Return the last perplexity of a row of Table 2."""
    return float([ppl for ppl in row["ppl"] if ppl is not None][-1])


def paper_size(groups: Sequence[Experiment]) -> dict[str, str]:
    """Return the paper's name of each size of the backbone; without names, the smaller size is base."""
    ours = list(by_size(groups))
    named = {size: word for size in ours for word in SIZES if word in size.split(", ")}
    return named or dict(zip(ours, SIZES, strict=False))


def paper_perplexities(groups: Sequence[Experiment]) -> Table:
    """Return Table 2 next to the same learners here, with ratios to SM_w1 with 4 experts."""
    sizes, rows = paper_size(groups), []
    plain = [each for each in groups if each.first.settings.get("--grow-method", "copy") == "copy"]
    plain.sort(key=lambda each: -len(each.first.settings))  # the last one, with the fewest options, counts
    ours = {(sizes.get(each.first.size), each.label, each.first.experts): each for each in plain}
    theirs = {(row["size"], row["learner"], row["experts"]): row for row in paper_tables()["table2"]}
    for key, row in theirs.items():
        if key not in ours:
            continue
        own = ours[key].spread(lambda run: run.final)
        reference = ours.get((key[0], *REFERENCE))
        base = None if reference is None else reference.spread(lambda run: run.final)
        cells: Row = {"size": row["size"], "learner": key[1], "experts": key[2]}
        cells |= {f"paper t{t}": Cell("*") if ppl is None else number(ppl, 2) for t, ppl in enumerate(row["ppl"])}
        cells |= {
            "our final PPL": spread(own, 2),
            "paper, of SM_w1": number(final(row) / final(theirs[key[0], *REFERENCE]), 3),
        }
        rows.append(cells | {"ours, of SM_w1": number(own.mean / base.mean, 3) if own and base else NOTHING})
    notes = "of SM_w1: final perplexity divided by the perplexity of SM_w1 with 4 experts; only these ratios compare."
    return Table("paper", "The paper's Table 2 next to these runs", notes, rows)


def paper_controls(groups: Sequence[Experiment]) -> Table:
    """Return Table 1, sequential learning next to i.i.d. training, next to the same learners here."""
    sizes, rows = paper_size(groups), []
    theirs = {(row["size"], row["learner"], row["experts"]): row for row in paper_tables()["table1"]}
    for control, sequential, k in iid_pairs(groups):
        key = (sizes.get(control.first.size, ""), control.first.learner, control.first.experts)
        iid, other = control.at(k - 1), sequential.at(k - 1)
        paper = theirs.get(key, {"iid": {}})
        if str(k) not in paper["iid"] or iid is None or other is None:
            continue
        cells: Row = {"size": key[0], "learner": key[1], "experts": key[2], "k": Cell(str(k), k)}
        pairs = {"paper": (paper["iid"][str(k)], paper["sequential"][str(k)]), "our": (iid.mean, other.mean)}
        for whose, (one, two) in pairs.items():
            cells |= {f"{whose} i.i.d.": number(one, 2), f"{whose} sequential": number(two, 2)}
            cells[f"{whose} gap"] = Cell(f"{two / one - 1:+.1%}", two / one - 1)
        rows.append(cells)
    return Table("paper_iid", "The paper's Table 1 next to these runs", "Test perplexity; k: mega-batches.", rows)
