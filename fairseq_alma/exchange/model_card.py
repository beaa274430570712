"""Create the model card of an exported folder: sizes, data, training and test results."""

import contextlib
from pathlib import Path
from typing import Sequence

from fairseq_alma.data.stream import Split, Stream
from fairseq_alma.errors import AlmaError, printable
from fairseq_alma.runs.run_folder import STAGE_RECORD, RunFolder, stage_predictor
from fairseq_alma.text.stage_checkpoints import ModelFacts
from fairseq_alma.text.train_options import UPDATE_COUNTS

MOST_INPUTS = 12  # maximum number of input file names on a card
_PAGE = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- fairseq_alma
---

# A language model trained with fairseq_alma

{table}

## Use

```python
from transformers import pipeline

print(pipeline("text-generation", model=FOLDER)("The")[0]["generated_text"])
```

The architecture is {architecture} of transformers 5 or newer; fairseq_alma is not needed. The tokenizer puts
{beginning}. The maximum sequence length is {context:,} tokens.

Licence: {licence}
"""


def model_card(
    path: Path, stream: Stream, facts: ModelFacts, architecture: str, context: int, beginning: str, is_imported: bool
) -> str:
    """Return the model card in Markdown. Training and test results come from the run that contains the checkpoint.

    Args:
        path: exported checkpoint.
        stream: stream that the model was trained on.
        facts: sizes of the model in the folder.
        architecture: name of the model class in transformers.
        context: maximum sequence length in tokens, at least the sequence length in training.
        beginning: tokens before a text; see `beginning_of`.
        is_imported: whether training began with an imported model.
    """
    inputs = dict.fromkeys(source["name"] for entry in stream.history for source in entry.get("inputs", ()))
    names = [f"`{printable(name).replace('|', '/').replace('`', '')}`" for name in inputs]
    names[MOST_INPUTS:] = [f"{len(names) - MOST_INPUTS} more"] if names[MOST_INPUTS:] else []
    rows = {
        "parameters": f"{facts.num_params:,}",
        **({"experts per Switch layer": str(facts.num_experts)} if facts.num_experts > 1 else {}),
        "stream": f"{stream.num_megabatches} mega-batches, fingerprint `{stream.fingerprint[:16]}`",
        "text": f"{_amount([*map(stream.megabatch, range(stream.num_megabatches))])}; {', '.join(names)}",
        "test set": f"{_amount([stream.split('test')])}, held out",
        **_record_rows(path, stream),
    }
    table = "\n".join(["| property | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
    licence = "not specified; add the licence before publishing the model."
    if is_imported:
        licence = "this model began as an imported model, and the licence of that model applies."
    return _PAGE.format(table=table, architecture=architecture, context=context, beginning=beginning, licence=licence)


def _amount(splits: Sequence[Split]) -> str:
    documents, size = (sum(getattr(split, name) for split in splits) for name in ("num_documents", "num_bytes"))
    return f"{documents:,} documents, {size / 1e6:,.2f} MB"


def _record_rows(path: Path, stream: Stream) -> dict[str, str]:
    """Return the table rows on training and test (property -> value). Without test results, the last row says why."""
    # The folder of a stage has a subfolder for a branch (model copy, trained with a decaying learning rate).
    root = next((each for each in path.resolve().parents[:3] if (each / STAGE_RECORD).is_file()), None)
    run = None if root is None else RunFolder(root.parent).read_run()
    if root is None or run is None:
        return {"test": "no results; the checkpoint does not belong to a run of alma-stream"}
    folder = RunFolder(root.parent)
    number = next(each for each in folder.stages() if folder.stage_folder(each).name == root.name)
    # With random initial weights, the stages before trained other models.
    is_new = run["options"].get("init") == "scratch"
    stages = [each for each in map(folder.read_stage, range(number * is_new, number + 1)) if each is not None]
    updates, tokens = (sum(each[name] for each in stages) for name in ("num_updates", "train_tokens"))
    stage = stages[-1]
    seen = len(stage["megabatches"]) if is_new and not run["options"]["replay"] else max(stage["megabatches"]) + 1
    given = run["train_options"].items()  # the numbers of updates are those of the first stage
    options = [f"{name} {value}".strip() for name, value in given if name not in UPDATE_COUNTS]
    rows = {
        "learner": f"{run['learner']}, waiting time {run['options']['wait']}, seed {run['seed']}",
        "training": f"{updates:,} updates on {tokens // (run['options'].get('num_members') or 1):,} tokens",
        "options": f"`{' '.join(options)}`",
        "mega-batches seen": f"{seen} of {stream.num_megabatches} (stage {number})",
    }
    with contextlib.suppress(AlmaError):  # The tested checkpoint may not exist anymore.
        if path.samefile(stage_predictor(folder, stage)):
            rows["test perplexity"] = f"{stage['test']['ppl']:.2f} per token, with the sequence length of training"
            bits = stage["test"].get("bits_per_byte")
            return rows if bits is None else {**rows, "test bits per byte": f"{bits:.4f}"}
    return {**rows, "test": "no results; another checkpoint of the stage was tested"}
