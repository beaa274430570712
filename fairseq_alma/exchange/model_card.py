"""The page that goes with an exported model: what it is, what it learned from, how good it is, how it is used."""

from pathlib import Path
from typing import Any, Mapping, Optional

from fairseq_alma.checkpoints.model_facts import ModelFacts
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.metrics.anytime import bits_per_byte
from fairseq_alma.runs.predictor import stage_predictor
from fairseq_alma.runs.run_folder import STAGE_RECORD, RunFolder

_HEADER = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- mixture-of-experts
- fairseq_alma
---

"""
_USE = """\

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)  # it has no code: this avoids a question
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)  # or import fairseq_alma first
prompt = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=30)[0], skip_special_tokens=True))
```

Sequences begin with `{first}`, which the tokenizer puts there, and have at most {longest} tokens. `model(…, labels=…,
output_router_logits=True)` adds the balance loss to the loss, as Mixtral's classes do: train with that. With
`trust_remote_code` the file `modeling_alma.py` of this folder is run; it is fairseq_alma's own.

Licence: to be stated by whoever publishes the model.
"""


def model_card(path: Path, stream: Stream, facts: ModelFacts, longest: int, first: str) -> str:
    """Return the page, in Markdown.

    Args:
        path: the checkpoint; where it is part of a run, its records say how good it is.
        stream: what it was trained on.
        facts: its sizes.
        longest: tokens of a sequence.
        first: the special token that sequences begin with.
    """
    rows = {
        "parameters": f"{facts.num_params:,}",
        "experts per Switch layer": str(facts.num_experts),
        "models": str(facts.num_members),
        "stream": f"{stream.num_megabatches} mega-batches, fingerprint `{stream.fingerprint[:16]}`",
        **_record_rows(path, stream),
    }
    table = "\n".join(["| what | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
    return f"{_HEADER}# {_title(facts)}\n\n{table}\n{_USE.format(longest=longest, first=first)}"


def _title(facts: ModelFacts) -> str:
    one = "A Switch language model" if facts.num_experts > 1 else "A dense language model"
    return one if facts.num_members == 1 else f"{facts.num_members} Switch language models as one"


def _record_rows(path: Path, stream: Stream) -> dict[str, str]:
    """Return what ``run.json`` and ``stage.json`` say, for a checkpoint within a run."""
    found = _records(path)
    if found is None:
        return {"test": "not part of a run of alma-stream: no figures are known"}
    run, stage, folder = found
    test, split = stage["test"], stream.split("test")
    seen = stage["megabatches"]
    arrivals = max(stream.num_megabatches, max(seen) + 1)  # run.json has as many as there were when the run began
    rows = {
        "learner": f"{run['learner']}, waiting time {run['options']['wait']}, seed {run['seed']}",
        "mega-batches seen": f"up to {max(seen)} of 0 to {arrivals - 1} (stage {stage['stage']})",
    }
    try:
        tested = stage_predictor(folder, stage)
    except AlmaError:
        return {**rows, "test": "no figures are known; what was tested is not kept"}
    if not path.samefile(tested):
        return {**rows, "test": f"no figures are known; what was tested is {tested.relative_to(folder.root)}"}
    rows |= {
        "test perplexity": f"{test['ppl']:.2f} per token, in windows of the training length",
        "test loss": f"{test['loss']:.4f} bits per token",
    }
    bits = bits_per_byte(test["loss"], split.num_tokens, split.num_bytes)
    return rows if bits is None else {**rows, "test bits per byte": f"{bits:.4f}"}


def _records(path: Path) -> Optional[tuple[Mapping[str, Any], Mapping[str, Any], RunFolder]]:
    """Return the records of the run and of the stage that a checkpoint stands in, three folders above it at most."""
    for folder in list(path.absolute().parents)[:3]:  # a branch has a folder of its own
        if (folder / STAGE_RECORD).is_file():
            run = RunFolder(folder.parent)
            record = run.read_run()
            stage = next((n for n in run.stages() if run.stage_folder(n).name == folder.name), None)
            content = None if stage is None else run.read_stage(stage)
            return None if record is None or content is None else (record, content, run)
    return None
