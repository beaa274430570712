"""The paper's own numbers, Tables 1 and 2 of arXiv:2106.09563v5, as rows and in the form of runs.

The paper has no table of its image experiments, so there are none for images here. Table 2 gives no compute: it follows
from what the text says, 42 and 126 GFLOPs to predict a sequence of 512 tokens (section 6.2), 192 sequences in a batch
and 120,000 updates at each of the four mega-batches (Appendix B, section 5); training costs three times as much.
"""

import json
import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Mapping, Optional

from fairseq_alma.report.read_run import TERA, RunTable, rows_of
from fairseq_alma.report.spelling import NAMES, TEXT

CITATION = "Caccia et al., On Anytime Learning at Macroscale (arXiv:2106.09563v5)"
FIGURE_TITLE = "the paper's results (Table 2)"
FIGURE_CAPTION = (
    " Below: the paper's own results, of learners that do not wait, in both of its sizes (Table 2; compute worked out "
    "from the costs that the paper states). Its text and its tokenizer are others, so perplexities do not compare."
)
VOCAB_SIZE = 50_000
TOKENS_PER_SEQUENCE = 512
_TFLOPS_PER_SEQUENCE: Mapping[str, float] = {"base": 0.042, "large": 0.126}
_SEQUENCES_PER_MEGABATCH = 192 * 120_000
_TRAINING_OVER_PREDICTING = 3


@dataclass(frozen=True)
class PerplexityRow:
    """A row of Table 2, of one size of model (``base`` or ``large``).

    Attributes:
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
class ControlRow:
    """A row of Table 1: a learner's test perplexity on k mega-batches at once (i.i.d.) and one after the other, by k."""

    size: str
    learner: str
    experts: str
    iid: Mapping[int, float]
    sequential: Mapping[int, float]


def _tables() -> Mapping[str, Any]:
    return json.loads(resources.files(__package__).joinpath("paper_tables.json").read_text(encoding="utf-8"))


def perplexity_rows() -> list[PerplexityRow]:
    """Return Table 2, row by row."""
    rows = []
    for row in _tables()["table2"]:
        millions = row["params"] * (len(row["ppl"]) if len(row["params"]) == 1 else 1)
        params = tuple(1_000_000 * each for each in millions)
        rows.append(PerplexityRow(row["size"], row["learner"], row["experts"], params, tuple(row["ppl"])))
    return rows


def control_rows() -> list[ControlRow]:
    """Return Table 1, row by row."""
    rows = []
    for row in _tables()["table1"]:
        iid, sequential = ({k: row[f"k{k}"][how] for k in (3, 4)} for how in ("iid", "seq"))
        rows.append(ControlRow(row["size"], row["learner"], row["experts"], iid, sequential))
    return rows


def paper_runs() -> RunTable:
    """Return the rows of Table 2 without waiting as runs, so that they are drawn as runs are (Figure 5)."""
    return RunTable.of(_run(row) for row in perplexity_rows() if None not in row.ppl)


def _run(row: PerplexityRow) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    name = row.learner.partition("_")[0]
    learner = next(each for each, spelled in NAMES.items() if spelled == name)
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
    stream = {
        "kind": TEXT, "path": "paper", "fingerprint": "paper", "vocab_size": VOCAB_SIZE, "num_megabatches": len(row.ppl),
    }  # fmt: skip
    options = {"wait": 1, "replay": False, "drop_rest": False, "init": "scratch" if learner == "gens" else "previous"}
    train_options = {"--arch": f"alma_switch_lm_{row.size}", "--num-experts": row.experts}
    run = {"learner": learner, "seed": 0, "options": options, "train_options": train_options, "stream": stream}
    return rows_of(Path(f"{row.size}-{name}-{row.experts}"), run, records)
