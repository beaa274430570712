"""The paper's own numbers, to be set beside those of runs: Tables 1 and 2 of arXiv:2106.09563v5.

The paper has no table of its image experiments, so there are none for images here.
"""

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any, Mapping, Optional

TABLES = "paper_tables.json"
CITATION = "Caccia et al., On Anytime Learning at Macroscale (arXiv:2106.09563v5)"


@dataclass(frozen=True)
class PaperRow:
    """A row of Table 2, of one size of model.

    Attributes:
        size: ``base`` or ``large``.
        learner: with its variant: ``SM_w3 (3x steps)``.
        experts: in each Switch layer, ``@`` models; of growing learners at each mega-batch.
        num_params: at each of the four mega-batches.
        ppl: test perplexity after each of the four mega-batches; None while the learner waits.
    """

    size: str
    learner: str
    experts: str
    num_params: tuple[int, ...]
    ppl: tuple[Optional[float], ...]

    @property
    def final(self) -> float:
        """The last perplexity."""
        return [ppl for ppl in self.ppl if ppl is not None][-1]


@dataclass(frozen=True)
class PaperControl:
    """A row of Table 1: the same learner on k mega-batches at once (i.i.d.) and one after the other.

    Attributes:
        size: ``base`` or ``large``.
        learner: ``Ens``.
        experts: in each Switch layer, ``@`` models.
        iid: k -> test perplexity.
        sequential: k -> test perplexity.
    """

    size: str
    learner: str
    experts: str
    iid: Mapping[int, float]
    sequential: Mapping[int, float]


@functools.cache
def _tables() -> Mapping[str, Any]:
    return json.loads(resources.files(__package__).joinpath(TABLES).read_text(encoding="utf-8"))


def table2() -> list[PaperRow]:
    """Return Table 2, row by row."""
    rows = []
    for row in _tables()["table2"]:
        millions = row["params"] * (len(row["ppl"]) if len(row["params"]) == 1 else 1)
        num_params = tuple(1_000_000 * each for each in millions)
        rows.append(PaperRow(row["size"], row["learner"], row["experts"], num_params, tuple(row["ppl"])))
    return rows


def table1() -> list[PaperControl]:
    """Return Table 1, row by row."""
    return [
        PaperControl(
            row["size"],
            row["learner"],
            row["experts"],
            iid={k: row[f"k{k}"]["iid"] for k in (3, 4)},
            sequential={k: row[f"k{k}"]["seq"] for k in (3, 4)},
        )
        for row in _tables()["table1"]
    ]
