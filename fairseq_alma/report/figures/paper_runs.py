"""The paper's own language results in the form of runs, so that they are drawn as runs are.

Source: Table 2 of arXiv:2106.09563v5, the learners that do not wait, as in its Figure 5. The table gives no compute. It
follows from what the text says: 42 and 126 GFLOPs to predict a sequence of 512 tokens (section 6.2), 192 sequences in a
batch and 120,000 updates at each of the four mega-batches (Appendix B, section 5); training costs three times as much.
"""

from pathlib import Path
from typing import Mapping

from fairseq_alma.report.figures.trajectory import TERA
from fairseq_alma.report.paper_numbers import PaperRow, table2
from fairseq_alma.report.run_figures import NAMES, TEXT, RunFigures

TITLE = "the paper's results (Table 2)"
CAPTION = (
    " Below: the paper's own results, of learners that do not wait, in both of its sizes (Table 2; compute worked out "
    "from the costs that the paper states). Its text and its tokenizer are others, so perplexities do not compare."
)
VOCAB_SIZE = 50_000
TOKENS_PER_SEQUENCE = 512
_TFLOPS_PER_SEQUENCE: Mapping[str, float] = {"base": 0.042, "large": 0.126}
_SEQUENCES_PER_MEGABATCH = 192 * 120_000
_TRAINING_OVER_PREDICTING = 3


def paper_runs() -> list[RunFigures]:
    """Return the rows of Table 2 without waiting as runs."""
    return [_run(row) for row in table2() if None not in row.ppl]


def _run(row: PaperRow) -> RunFigures:
    name = row.learner.partition("_")[0]
    learner = next(each for each, spelled in NAMES.items() if spelled == name)
    value = {arrival: ppl for arrival, ppl in enumerate(row.ppl) if ppl is not None}
    stages = row.experts.split(", ")
    stages = stages if len(stages) > 1 else stages * len(value)
    parts = [[int(number) for number in f"{stage}@1".split("@")[:2]] for stage in stages]
    predicting = _TFLOPS_PER_SEQUENCE[row.size] * TERA
    # An update of a growing ensemble trains the new model alone.
    trained = [1 if learner == "gens" else members for _, members in parts]
    training = _TRAINING_OVER_PREDICTING * predicting * _SEQUENCES_PER_MEGABATCH
    return RunFigures(
        path=Path(f"{row.size}-{name}-{row.experts}"),
        learner=learner,
        label=row.learner,
        size=row.size,
        seed=0,
        settings=f"{row.size} {row.learner} {row.experts}",
        kind=TEXT,
        stream={"kind": TEXT, "path": "paper", "fingerprint": "paper", "vocab_size": VOCAB_SIZE},
        versions={},
        num_arrivals=len(row.ppl),
        planned=tuple(range(len(row.ppl))),
        wait=1,
        replay=False,
        iid=None,
        options={},
        train_options={},
        value=value,
        loss={},
        num_params=dict(enumerate(row.num_params)),
        num_experts={arrival: experts for arrival, (experts, _) in enumerate(parts)},
        num_members={arrival: members for arrival, (_, members) in enumerate(parts)},
        num_updates={},
        train_flops={arrival: training * count for arrival, count in enumerate(trained)},
        test_flops={arrival: predicting * count / TOKENS_PER_SEQUENCE for arrival, (_, count) in enumerate(parts)},
        valid={},
        before_growth={},
        grown={},
        growth_jumps={},
        wall_seconds={},
        extras={},
    )
