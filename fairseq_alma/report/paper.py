"""The paper's own numbers, Tables 1 and 2 of arXiv:2106.09563v5: beside those of runs, and in the form of runs.

The paper has no table of its image experiments, so there are none for images here. Table 2 gives no compute: it follows
from what the text says, 42 and 126 GFLOPs to predict a sequence of 512 tokens (section 6.2), 192 sequences in a batch
and 120,000 updates at each of the four mega-batches (Appendix B, section 5); training costs three times as much.
"""

import functools
import math
import re
from collections import defaultdict
from importlib import resources
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

import msgspec
from msgspec import Struct
from pandas import DataFrame

from fairseq_alma.learners.learner import LEARNERS
from fairseq_alma.report.experiment import Experiment, controls, sizes_in_order
from fairseq_alma.report.finding import Spread
from fairseq_alma.report.read_run import TERA, RunRows, RunTable, rows_of
from fairseq_alma.report.spelling import (
    NOTHING,
    TEXT,
    Cell,
    Table,
    count_cell,
    number_cell,
    said,
    show_count,
    show_params,
    usual_init,
)

FIGURE_TITLE = "the paper's results (Table 2)"
SIZES = ("base", "large")
REFERENCE = ("SM_w1", "4")
VOCAB_SIZE = 50_000
TOKENS_PER_SEQUENCE = 512
_TFLOPS_PER_SEQUENCE: Mapping[str, float] = {"base": 0.042, "large": 0.126}
_SEQUENCES_PER_MEGABATCH = 192 * 120_000
_TRAINING_OVER_PREDICTING = 3
_OPTION = re.compile(r"(?<!\S)--\S+")


class PerplexityRow(Struct, frozen=True):
    """A row of Table 2: size (``base``, ``large``), learner with its variant, experts, what came of four mega-batches.

    ``experts``: in each Switch layer, ``@`` models; ``params``: in millions, one for all or one for each; ``ppl``: test
    perplexity, None while the learner waits.
    """

    size: str
    learner: str
    experts: str
    params: tuple[int, ...]
    ppl: tuple[Optional[float], ...]

    @property
    def num_params(self) -> tuple[int, ...]:
        """Parameters after each mega-batch."""
        millions = self.params if len(self.params) > 1 else self.params * len(self.ppl)
        return tuple(1_000_000 * each for each in millions)

    @property
    def final(self) -> float:
        """The last perplexity."""
        return [ppl for ppl in self.ppl if ppl is not None][-1]

    @property
    def settled(self) -> float:
        """The last perplexity over the first one; NaN while the learner waits for all of it."""
        return math.nan if self.ppl[0] is None else self.final / self.ppl[0]


class ControlRow(Struct, frozen=True):
    """A row of Table 1: test perplexity on k mega-batches at once (i.i.d.) and one after the other, by k."""

    size: str
    learner: str
    experts: str
    iid: dict[int, float]
    sequential: dict[int, float]


class PaperTables(Struct, frozen=True):
    """``paper_tables.json``: both tables, row by row."""

    table1: list[ControlRow]
    table2: list[PerplexityRow]


@functools.cache
def paper_tables() -> PaperTables:
    """Return the paper's numbers."""
    return msgspec.json.decode(
        resources.files(__package__).joinpath("paper_tables.json").read_bytes(), type=PaperTables
    )


def paper_runs() -> RunTable:
    """Return the rows of Table 2 without waiting as runs, so that they are drawn as runs are (Figure 5)."""
    return RunTable.of(_run(row) for row in paper_tables().table2 if None not in row.ppl)


def _run(row: PerplexityRow) -> RunRows:
    name = row.learner.partition("_")[0]
    learner = next(each for each, known in LEARNERS[TEXT].items() if known.label == name)
    stages = row.experts.split(", ")
    predicting = _TFLOPS_PER_SEQUENCE[row.size] * TERA
    training = _TRAINING_OVER_PREDICTING * predicting * _SEQUENCES_PER_MEGABATCH
    records = []
    for arrival, ppl in enumerate(row.ppl):
        experts, members = map(int, f"{stages[arrival] if len(stages) > 1 else stages[0]}@1".split("@")[:2])
        result = {"loss": math.log2(ppl or math.nan), "ppl": ppl}
        records.append({
            "stage": arrival, "megabatches": [arrival], "num_params": row.num_params[arrival], "num_experts": experts,
            "num_members": members, "num_updates": 120_000, "valid": result, "test": result,
            # An update of a growing ensemble trains the new model alone.
            "train_flops": training * (1 if learner == "gens" else members),
            "test_flops_per_token": predicting * members / TOKENS_PER_SEQUENCE,
        })  # fmt: skip
    stream = {"kind": TEXT, "path": "paper", "fingerprint": "paper", "vocab_size": VOCAB_SIZE, "num_megabatches": 4}
    options = {"wait": 1, "replay": False, "drop_rest": False, "iid": None, "init": usual_init(learner, "text")}
    train_options = {"--arch": f"alma_switch_lm_{row.size}", "--num-experts": row.experts}
    run = {"learner": learner, "seed": 0, "options": options, "train_options": train_options, "stream": stream}
    return rows_of(Path(f"{row.size}-{name}-{row.experts}"), run, records)


def _sizes(groups: Sequence[Experiment]) -> dict[str, str]:
    """Return the paper's size that each of ours stands for.

    Those that are called base or large are, if any is; else the smallest stands for base, the next for large.
    """
    ours = sizes_in_order(DataFrame([each.first for each in groups]))
    called = {size: word for size in ours for word in SIZES if word in size.split(", ")}
    return called or dict(zip(ours, SIZES, strict=False))


def paper_perplexities(groups: Sequence[Experiment]) -> Table:
    """Lay out the paper's Table 2 beside what the experiments came to, for the sizes and learners that both have.

    Its perplexities are of models and texts of another scale; what compares is the ratio to one learner of each: the
    single model with the fewest experts. Learners with options that the paper does not have are left out; of several
    others in one place (learning rates, for instance) each has a row.
    """
    sizes = _sizes(groups)
    ours: dict[tuple[Optional[str], str, str], list[Experiment]] = defaultdict(list)
    for each in groups:
        if set(_OPTION.findall(each.first.variant)) <= {"--num-members"}:
            ours[sizes.get(each.first.backbone), each.label, each.first.experts].append(each)
    theirs = {(row.size, row.learner, row.experts): row for row in paper_tables().table2}
    has_several = any(len(each) > 1 for key, each in ours.items() if key in theirs)
    rows = []
    for key, row in theirs.items() if ours.keys() & theirs.keys() else ():
        if row.size not in sizes.values():
            continue
        references = [each.spread("final") for each in ours[row.size, *REFERENCE]]
        reference = references[0] if len(references) == 1 else None
        found: list[Optional[Experiment]] = [*ours[key]]
        for mine in found or [None]:
            own, settled = (None if mine is None else mine.spread(name) for name in ("final", "settled"))
            params = math.nan if mine is None else mine.first.num_params
            rows.append({
                "size": row.size, "learner": row.learner, "experts": row.experts,
                **({"options": "" if mine is None else mine.note} if has_several else {}),
                "paper |θ|": Cell(show_params(dict(enumerate(row.num_params))), row.num_params[-1]),
                **{f"paper t{t}": number_cell(ppl, 2) for t, ppl in enumerate(row.ppl)},
                "our |θ|": count_cell(show_count(params), params),
                "our final PPL": NOTHING if own is None else Cell(own.show(2), own.mean),
                "paper last/first": number_cell(row.settled, 3),
                "our last/first": NOTHING if settled is None else Cell(settled.show(3), settled.mean),
                "paper, of SM_w1": number_cell(row.final / theirs[row.size, *REFERENCE].final, 3),
                "ours, of SM_w1": number_cell(own.mean / reference.mean if own and reference else math.nan, 3),
            })  # fmt: skip
    return Table("paper", *said("paper", sizes=sizes), DataFrame(rows))


def paper_controls(groups: Sequence[Experiment]) -> Table:
    """Lay out the paper's Table 1 beside the controls of the experiments."""
    sizes = _sizes(groups)
    theirs = {(row.size, row.learner, row.experts): row for row in paper_tables().table1}
    rows = []
    for sequential, pairs in controls(groups):
        key = sizes.get(sequential.first.backbone, ""), sequential.first.name, sequential.first.experts
        for k in [k for k in pairs if key in theirs and k in theirs[key].iid]:
            cells: dict[str, Any] = dict(zip(("size", "learner", "experts", "k"), (*key, f"{k}"), strict=True))
            paper = Spread(theirs[key].iid[k]), Spread(theirs[key].sequential[k])
            for whose, (iid, other) in (("paper", paper), ("our", pairs[k])):
                gap = other.mean / iid.mean - 1
                cells[f"{whose} iid"] = Cell(iid.show(2), iid.mean)
                cells[f"{whose} seq."] = Cell(other.show(2), other.mean)
                cells[f"{whose} gap"] = Cell(f"{gap:+.1%}", gap)
            rows.append(cells)
    return Table("paper_iid", *said("paper_iid", sizes=sizes), DataFrame(rows))
