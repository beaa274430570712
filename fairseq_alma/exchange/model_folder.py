"""``alma-export``: a checkpoint becomes a folder that ``transformers`` reads, without this package. No fairseq.

A stream's tokenizer becomes a ``tokenizer.json`` whose ids are those of the token files: fairseq's four symbols come
first, so that token u has id u + 4. What text looks like one of them is text: special tokens are never looked for in
it, neither there nor here.
"""

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
from fairseq_alma.data.tokens import FAIRSEQ_SYMBOLS, NUM_FAIRSEQ_SYMBOLS, StreamTokenizer, TokenFile
from fairseq_alma.errors import AlmaError, printable
from fairseq_alma.exchange.exported_folder import (
    AUTO_MAP,
    write_tensors,
)
from fairseq_alma.exchange.member_weights import Group, groups_of, member_sizes, named_weights
from fairseq_alma.files import new_folder
from fairseq_alma.metrics import bits_per_byte
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
models with it, such as lm_eval; not by llama.cpp (GGUF) or vLLM.

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


_OTHER_TOKENIZER = (
    "export needs a byte-level BPE, or a sentencepiece model of type unigram, as alma-prep-text trains them"
)
_UNMATCHED = -1e6  # score of pieces that no text may become
_SPACE = "\u2581"


def tokenizer_files(tokenizer: StreamTokenizer, max_positions: int, starts_with_bos: bool) -> dict[str, str]:
    """Return the content of ``tokenizer.json``, ``tokenizer_config.json`` and ``special_tokens_map.json``.

    Args:
        tokenizer: the stream's.
        max_positions: longest sequence of the model, in tokens.
        starts_with_bos: whether sequences begin with ``<s>`` (fairseq's ``--add-bos-token``) rather than ``</s>``.

    Raises:
        AlmaError: it is of a kind that cannot be written so.
    """
    if tokenizer.kind == "tokenizers":
        content, specials = _from_tokenizers(tokenizer)
    else:
        content, specials = _from_sentencepiece(tokenizer)
    bos = specials[0 if starts_with_bos else 2]
    content["truncation"] = content["padding"] = None
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 0}},
        ],
        "special_tokens": {bos: {"id": bos, "ids": [specials.index(bos)], "tokens": [bos]}},
    }
    names = {"bos_token": bos, "eos_token": specials[2], "pad_token": specials[1], "unk_token": specials[3]}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "model_max_length": max_positions,
        "padding_side": "left",
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": json.dumps(content, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "special_tokens_map.json": json.dumps(names, indent=2) + "\n",
    }


def check_same_ids(content: str, tokenizer: StreamTokenizer, texts: Iterable[str]) -> None:
    """Raise AlmaError unless a ``tokenizer.json`` gives the ids of the stream's tokenizer.

    Args:
        content: of the file.
        tokenizer: the stream's.
        texts: to compare them on.
    """
    from tokenizers import Tokenizer

    exported = Tokenizer.from_str(content)
    exported.encode_special_tokens = True
    for text in texts:
        needed = [token + NUM_FAIRSEQ_SYMBOLS for token in tokenizer.encode_batch([text])[0]]
        if exported.encode(text, add_special_tokens=False).ids != needed:
            raise AlmaError(
                f"{tokenizer.file}: as a tokenizer.json it gives other ids, first for {text[:40]!r}; {_OTHER_TOKENIZER}"
            )


def _from_tokenizers(tokenizer: StreamTokenizer) -> tuple[dict[str, Any], list[str]]:
    """Shift all ids of a ``tokenizer.json``, and put fairseq's symbols before them."""
    content = json.loads(tokenizer.file.read_text(encoding="utf-8"))
    model = content["model"]
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict):
        raise AlmaError(f"{tokenizer.file}: a model of type {model.get('type')} found; {_OTHER_TOKENIZER}")
    specials = _special_names(vocabulary, space="" if model.get("type") == "BPE" else " ")
    shifted = {piece: token + NUM_FAIRSEQ_SYMBOLS for piece, token in vocabulary.items()}
    model["vocab"] = {**{name: token for token, name in enumerate(specials)}, **shifted}
    for added in content.get("added_tokens") or []:
        added["id"] += NUM_FAIRSEQ_SYMBOLS
    content["added_tokens"] = [_added(token, name) for token, name in enumerate(specials)] + (
        content.get("added_tokens") or []
    )
    return content, specials


def _from_sentencepiece(tokenizer: StreamTokenizer) -> tuple[dict[str, Any], list[str]]:
    """Write a unigram model of sentencepiece in the terms of ``tokenizers``."""
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]
    model, kinds = proto.FromString(tokenizer.file.read_bytes()), proto.SentencePiece
    spec, trainer = model.normalizer_spec, model.trainer_spec
    has_own_rules = spec.precompiled_charsmap or spec.remove_extra_whitespaces or spec.add_dummy_prefix
    if trainer.model_type != trainer.UNIGRAM or has_own_rules or not spec.escape_whitespaces:
        raise AlmaError(f"{tokenizer.file}: of another type, or it alters text before it is cut; {_OTHER_TOKENIZER}")
    if any(piece.type == kinds.USER_DEFINED for piece in model.pieces):
        raise AlmaError(f"{tokenizer.file}: it has symbols that a user defined; {_OTHER_TOKENIZER}")
    # A space stands in no text any more when its pieces are looked up, so no text becomes what has one in its name.
    specials = _special_names([piece.piece for piece in model.pieces], space=" ")
    pieces: list[list[Any]] = [[name, _UNMATCHED] for name in specials]
    unknown = None
    for number, piece in enumerate(model.pieces):
        if piece.type in (kinds.UNKNOWN, kinds.CONTROL, kinds.UNUSED):
            unknown = len(pieces) if piece.type == kinds.UNKNOWN else unknown
            pieces.append([f"<unit:{number} >", _UNMATCHED])
        else:
            pieces.append([piece.piece, _UNMATCHED if piece.type == kinds.BYTE else piece.score])
    as_space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    content = {
        "version": "1.0",
        "added_tokens": [_added(token, name) for token, name in enumerate(specials)],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [as_space, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": pieces, "byte_fallback": trainer.byte_fallback},
    }
    return content, specials


def _special_names(taken: Sequence[str] | dict[str, int], space: str) -> list[str]:
    """Return names for fairseq's symbols that no piece has: ``</s>``, or with a space where text may become one."""
    names = [f"{name[:-1]}{space}>" for name in FAIRSEQ_SYMBOLS]
    while any(name in taken for name in names):
        names = [f"{name[:-1]} >" for name in names]
    return names


def _added(token: int, name: str) -> dict[str, Any]:
    how = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token, "content": name, **how}
