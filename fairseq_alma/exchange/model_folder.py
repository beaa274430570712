"""``alma-export``: a checkpoint becomes a folder that ``transformers`` reads, without this package. No fairseq."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence

import torch
from torch import Tensor

from fairseq_alma.checkpoints.checkpoint_file import Checkpoint, read_checkpoint
from fairseq_alma.checkpoints.model_facts import ModelFacts, describe_model
from fairseq_alma.data.stream import Split, Stream
from fairseq_alma.data.token_file import NUM_FAIRSEQ_SYMBOLS, TokenFile
from fairseq_alma.data.tokenizer import FAIRSEQ_SYMBOLS, StreamTokenizer
from fairseq_alma.errors import AlmaError, printable
from fairseq_alma.exchange.exported_folder import AUTO_MAP, write_sums, write_tensors
from fairseq_alma.exchange.member_weights import Group, groups_of, member_sizes, named_weights
from fairseq_alma.exchange.tokenizer_files import check_same_ids, tokenizer_files
from fairseq_alma.files import new_folder
from fairseq_alma.metrics.anytime import bits_per_byte
from fairseq_alma.runs.lookup import stream_of
from fairseq_alma.runs.run_folder import STAGE_RECORD, RunFolder, stage_predictor
from fairseq_alma.terminal import spell_duration

MODELING_FILE = "modeling_alma.py"
MOST_INPUTS = 12  # that a model card names
CHECKED_TOKENS = 200_000  # of the test set, on which both forms of a tokenizer are compared
BOS, EOS = 0, 2
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "float64"}


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        facts: of the model.
        num_tokens: tokens of its vocabulary, fairseq's four included.
        size: of the weights' file, in bytes.
    """

    facts: ModelFacts
    num_tokens: int
    size: int


def export_model(path: Path, out: Path, stream_folder: Optional[Path] = None) -> Exported:
    """Write a language model's checkpoint as a folder for ``transformers``.

    Args:
        path: the checkpoint, of one model or an ensemble.
        out: the folder, which must not be there.
        stream_folder: the stream whose tokenizer the model knows; None: the one that it was trained on.

    Raises:
        AlmaError: it is no language model of this package, or the stream has another dictionary or tokenizer; nothing
            is written then.
    """
    checkpoint = read_checkpoint(path)
    config, weights = checkpoint["cfg"]["model"], checkpoint["model"]
    groups = list(groups_of(config, weights, path))
    stream = stream_of(checkpoint, path, stream_folder)
    tokenizer = tokenizer_of(stream, groups, path)
    config_json = config_of(checkpoint, groups)
    longest = config_json["max_position_embeddings"]
    files = tokenizer_files(tokenizer, longest, config_json["bos_token_id"] == BOS)
    check_same_ids(files["tokenizer.json"], tokenizer, _texts(stream, tokenizer))
    facts = describe_model(config, weights, path)
    with new_folder(out, "--out ", "alma-export") as folder:
        write_tensors(dict(tensors_of(groups, path)), folder / "model.safetensors")
        files["config.json"] = json.dumps(config_json, indent=2) + "\n"
        files["generation_config.json"] = json.dumps(_generation(config_json), indent=2) + "\n"
        first = "<s>" if config_json["bos_token_id"] == BOS else "</s>"
        files["README.md"] = model_card(path, stream, facts, longest, first)
        files[MODELING_FILE] = (Path(__file__).parent / MODELING_FILE).read_text(encoding="utf-8")
        for name, content in files.items():
            (folder / name).write_text(content, encoding="utf-8")
        write_sums(folder)
    return Exported(facts, config_json["vocab_size"], (out / "model.safetensors").stat().st_size)


def tokenizer_of(stream: Stream, groups: Sequence[Group], path: Path) -> StreamTokenizer:
    """Return a stream's tokenizer; raise AlmaError if it has more or fewer tokens than a model."""
    tokenizer = StreamTokenizer.open(stream.root)
    needed = tokenizer.vocab_size + NUM_FAIRSEQ_SYMBOLS
    for group in groups:
        found = group.members[0]["decoder.embed_tokens.weight"].size(0)
        if found != needed:
            raise AlmaError(
                f"{path}: a vocabulary of {found:,} tokens, the stream {stream.root} has {needed:,} with fairseq's "
                "four; give the stream it was trained on as --stream"
            )
    return tokenizer


def _texts(stream: Stream, tokenizer: StreamTokenizer) -> Iterator[str]:
    """Yield documents of the test set, and one that looks like special tokens."""
    yield f"{' '.join(FAIRSEQ_SYMBOLS)} {''.join(FAIRSEQ_SYMBOLS)}"
    file = TokenFile(stream.prefix(stream.split("test")))
    start = 0
    for size in file.sizes.tolist():
        tokens = [token - NUM_FAIRSEQ_SYMBOLS for token in file.ids[start : start + size].tolist()]
        yield tokenizer.decode(tokenizer.symbols[token] for token in tokens if token >= 0)
        start += size
        if start > CHECKED_TOKENS:
            return


def config_of(checkpoint: Checkpoint, groups: Sequence[Group]) -> dict[str, Any]:
    """Return the content of ``config.json``, see `modeling_alma.AlmaConfig`."""
    members: list[dict[str, Any]] = []
    combined = []
    for group in groups:
        first = len(members)
        members += [member_sizes(group.options)] * len(group.members)
        combined.append({"members": list(range(first, len(members))), "weight": group.weight})
    table = groups[0].members[0]["decoder.embed_tokens.weight"]
    return {
        "architectures": ["AlmaForCausalLM"],
        "auto_map": AUTO_MAP,
        "model_type": "alma_lm",
        "dtype": _DTYPES[table.dtype],
        "vocab_size": table.size(0),
        "max_position_embeddings": min(member["max_positions"] for member in members),
        "router_aux_loss_coef": groups[0].options.balance_loss_weight,
        "output_router_logits": False,
        "pad_token_id": 1,
        "bos_token_id": BOS if (checkpoint["cfg"].get("task") or {}).get("add_bos_token") else EOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,  # there is no other matrix than the input embeddings
        "groups": combined,
        "members": members,
    }


def _generation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Text ends with </s>, or where the model takes no more tokens; fairseq's other symbols are never written."""
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {**ids, "max_length": config["max_position_embeddings"], "suppress_tokens": [0, 1, 3]}


def tensors_of(groups: Sequence[Group], path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under their names in a folder; they stay where they are."""
    number = 0
    for group in groups:
        for weights in group.members:
            yield from named_weights(weights, number, path)
            number += 1


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

It is loaded by transformers 5 or newer (`pipeline`, `AutoModelForCausalLM`, `generate`, `Trainer`), by what loads
models with it, such as lm_eval, and by `alma-score` and `alma-generate`; not by llama.cpp (GGUF) or vLLM.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)  # it has no code: this avoids a question
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)  # or import fairseq_alma first
prompt = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=30)[0], skip_special_tokens=True))
```

Sequences begin with `{first}`, which the tokenizer puts there, and have at most {longest} tokens: generated text ends
there. `model(…, labels=…,
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
    weights_of = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    arrived, test = [stream.megabatch(number) for number in range(stream.num_megabatches)], stream.split("test")
    inputs = dict.fromkeys(source["name"] for entry in stream.history for source in entry.get("inputs", ()))
    rows = {
        "weights of": f"{weights_of:%Y-%m-%d}",
        "parameters": f"{facts.num_params:,}",
        "experts per Switch layer": str(facts.num_experts),
        "models": str(facts.num_members),
        "stream": f"{stream.num_megabatches} mega-batches, fingerprint `{stream.fingerprint[:16]}`",
        "text": f"{_amount(arrived)}; {_names(inputs)}",
        "test set": f"{_amount([test])}, of the same text, held out",
        **_record_rows(path, stream),
    }
    table = "\n".join(["| what | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
    return f"{_HEADER}# {_title(facts)}\n\n{table}\n{_USE.format(longest=longest, first=first)}"


def _amount(splits: Sequence[Split]) -> str:
    documents, words, size = (
        sum(getattr(split, name) for split in splits) for name in ("num_documents", "num_words", "num_bytes")
    )
    return f"{documents:,} documents, {words:,} words, {size / 1e6:,.2f} MB"


def _names(inputs: Iterable[str]) -> str:
    """Spell what a stream was made of, cut short."""
    names = [f"`{printable(name).replace('|', '/').replace('`', '')}`" for name in inputs]
    return ", ".join([*names[:MOST_INPUTS], *([f"{len(names) - MOST_INPUTS} more"] if names[MOST_INPUTS:] else [])])


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
        "trained by": _spent([each for each in map(folder.read_stage, range(stage["stage"] + 1)) if each is not None]),
        "options": f"`{' '.join(f'{name} {value}'.strip() for name, value in run['train_options'].items())}`",
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


def _spent(stages: Sequence[Mapping[str, Any]]) -> str:
    """Spell what the stages up to now took."""
    updates, tokens, flops, seconds = (
        sum(stage[name] for stage in stages) for name in ("num_updates", "train_tokens", "train_flops", "wall_seconds")
    )
    return f"{updates:,} updates on {tokens:,} tokens, {flops:.3g} operations, {spell_duration(seconds)} of wall time"


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
