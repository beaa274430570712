"""Export a checkpoint of ``alma_transformer_lm`` to a Hugging Face folder (Qwen3, or Qwen3-MoE with experts).

Most weight names differ only in the prefix: ``decoder.`` in the checkpoint, ``model.`` in the folder. The export splits
stacked experts into separate tensors. The output of the embedding norm depends only on the token, so the export applies
the norm to the rows of the embedding matrix.
"""

import contextlib
import errno
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterator, Mapping, Optional, Sequence

import torch.nn.functional as F
from torch import Tensor

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint, refuse_other_shapes
from fairseq_alma.data.stream import Split, Stream
from fairseq_alma.data.tokens import EOS, NUM_FAIRSEQ_SYMBOLS, StreamTokenizer, TokenFile
from fairseq_alma.errors import AlmaError, printable
from fairseq_alma.exchange import refuse_model
from fairseq_alma.exchange.tokenizer_files import (
    CONFIG,
    EXPORTABLE,
    TOKENIZER,
    Vocabulary,
    beginning_of,
    misread_text,
    vocabulary_of,
)
from fairseq_alma.files import publish, work_folder
from fairseq_alma.growth.gate_tree import has_experts
from fairseq_alma.runs.lookup import stream_of
from fairseq_alma.runs.run_folder import STAGE_RECORD, RunFolder, stage_predictor
from fairseq_alma.text.stage_checkpoints import ModelFacts, describe_model
from fairseq_alma.text.train_options import UPDATE_COUNTS
from fairseq_alma.text.transformer_lm import build_from_config

WEIGHTS = "model.safetensors"
CHECKED_TOKENS = 200_000  # number of tokens of the test set that the exported tokenizer must reproduce
_REMEDY = "give an unaltered checkpoint"
_STACK = re.compile(r"(.*\.mlp\.experts\.)(\w+_proj)")
MOST_INPUTS = 12  # maximum number of input file names on a card
_CARD = """\
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


def export_model(path: Path, out: Path, stream_folder: Optional[Path] = None) -> str:
    """Export the checkpoint of a language model to a transformers folder.

    Args:
        path: checkpoint to export.
        out: folder to create.
        stream_folder: stream with the tokenizer of the model; None: the training stream of the model.

    Returns:
        One line for the user: folder, architecture and sizes.

    Raises:
        AlmaError: transformers has no equivalent architecture, the checkpoint is damaged, the dictionaries of model and
            stream differ, or the tokenizer cannot be exported. In these cases, no file is written.
    """
    checkpoint = read_checkpoint(path)
    config, weights = checkpoint["cfg"]["model"], checkpoint["model"]
    refuse_model(str(path), config["_name"], bool(config.get("gate_trees")), config.get("eval_capacity_factor") or 0)
    stream = stream_of(checkpoint, path, stream_folder)
    tokenizer = StreamTokenizer.open(stream.root)
    try:
        options, num_rows = SimpleNamespace(**config), len(weights["decoder.embed_tokens.weight"])
        refuse_other_shapes(weights, build_from_config(config, num_rows), str(path), _REMEDY)
        if num_rows != tokenizer.vocab_size + NUM_FAIRSEQ_SYMBOLS:
            raise AlmaError(
                f"{path}: expected a stream with vocabulary size {num_rows:,}, as in the model, found vocabulary size "
                f"{tokenizer.vocab_size + NUM_FAIRSEQ_SYMBOLS:,} in {stream.root}; give the training stream as --stream"
            )
        context = min(filter(None, (options.tokens_per_sample, options.max_target_positions)))
        replaced = json.loads(options.symbol_ids) if options.symbol_ids else None
        vocabulary = vocabulary_of(tokenizer, context, replaced)
        context = max(context, vocabulary.context)
        settings = folder_config(options, weights, vocabulary, context)
        beginning = beginning_of(vocabulary.files[TOKENIZER], replaced[EOS] if replaced else EOS)
        tensors = dict(folder_weights(weights, options, settings["tie_word_embeddings"], vocabulary.rows))
        # The number of parameters in the folder is without fairseq's symbols.
        facts = replace(describe_model(config, weights, path), num_params=sum(map(Tensor.numel, tensors.values())))
    except (AttributeError, KeyError, TypeError) as error:
        raise AlmaError(f"{path}: the configuration is incomplete ({error}); {_REMEDY}") from error
    if replaced is None:
        text = misread_text(json.loads(vocabulary.files[TOKENIZER]), tokenizer, _test_texts(stream, tokenizer))
        if text is not None:
            raise AlmaError(
                f"{tokenizer.file}: this tokenizer and its export encode {text[:40]!r} differently; {EXPORTABLE}"
            )
    architecture = settings["architectures"][0]
    with work_folder(out, "alma-export") as folder:
        write_tensors(tensors, folder / WEIGHTS)
        texts = {
            **vocabulary.files,
            CONFIG: json.dumps(settings, indent=2) + "\n",
            "README.md": model_card(path, stream, facts, architecture, context, beginning, replaced is not None),
        }
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        size = (folder / WEIGHTS).stat().st_size
        publish(folder, out)
    experts = f"{facts.num_experts} experts, " if facts.num_experts > 1 else ""
    return (
        f"{out}: {architecture}, {facts.num_params:,} parameters, {experts}{settings['vocab_size']:,} tokens, "
        f"{size / 1e6:,.1f} MB"
    )


def _test_texts(stream: Stream, tokenizer: StreamTokenizer) -> Iterator[str]:
    """Yield documents of the test set until the total number of tokens exceeds `CHECKED_TOKENS`."""
    file, start = TokenFile(stream.root / "test"), 0
    for size in file.sizes.tolist():
        tokens = [token - NUM_FAIRSEQ_SYMBOLS for token in file.ids[start : start + size].tolist()]
        yield tokenizer.decode_batch([[token for token in tokens if token >= 0]])[0]
        start += size
        if start > CHECKED_TOKENS:
            return


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a safetensors file with default permissions. Raises OSError on failure."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:  # The message contains the system error as text.
        number = errno.ENOSPC if f"os error {errno.ENOSPC}" in str(error) else errno.EIO
        raise OSError(number, str(error), str(path)) from error
    path.chmod(mode)


def folder_config(options: Any, weights: Mapping[str, Tensor], vocabulary: Vocabulary, context: int) -> dict[str, Any]:
    """Return the content of config.json for the model options and weights of a checkpoint."""
    table, layers = weights["decoder.embed_tokens.weight"], range(options.decoder_layers)
    mixtures = [options.num_experts > 1 and has_experts(layer, options.moe_freq) for layer in layers]
    experts = {
        "num_experts": options.num_experts,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "moe_intermediate_size": options.decoder_ffn_embed_dim,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in layers if not mixtures[layer]],
        "output_router_logits": False,
        # transformers averages the balance loss over the Switch layers; this package sums it over these layers.
        "router_aux_loss_coef": options.balance_loss_weight * sum(mixtures),
    }
    return {
        "architectures": ["Qwen3MoeForCausalLM" if any(mixtures) else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if any(mixtures) else "qwen3",
        "dtype": str(table.dtype).removeprefix("torch."),
        "vocab_size": len(table if vocabulary.rows is None else vocabulary.rows),
        "hidden_size": options.decoder_embed_dim,
        "intermediate_size": options.decoder_ffn_embed_dim,
        "num_hidden_layers": options.decoder_layers,
        "num_attention_heads": options.decoder_attention_heads,
        "num_key_value_heads": options.num_kv_heads,
        "head_dim": options.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": options.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": options.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        # The norm changes only the input embeddings, so the output embeddings need a separate matrix.
        "tie_word_embeddings": options.share_decoder_input_output_embed and options.no_embedding_norm,
        **(experts if any(mixtures) else {}),
        **vocabulary.special_ids,
    }


def folder_weights(
    weights: Mapping[str, Tensor], options: Any, is_tied: bool, rows: Optional[list[int]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each tensor of model.safetensors, as a view where possible.

    Args:
        weights: weights of the checkpoint.
        options: model options of the checkpoint.
        is_tied: whether the folder has the same matrix for input and output embeddings.
        rows: embedding row in the checkpoint for each token of the folder; None if token u has row u.
    """
    for name, tensor in weights.items():
        own = name.removeprefix("decoder.")
        if own in ("embed_tokens.weight", "output_projection.weight") and rows is not None:
            tensor = tensor[rows]
        if own == "output_projection.weight":
            if not is_tied:
                yield "lm_head.weight", tensor
        elif stack := _STACK.fullmatch(own):
            for number, expert in enumerate(tensor):
                yield f"model.{stack[1]}{number}.{stack[2]}.weight", expert
        else:
            if own == "embed_tokens.weight" and not options.no_embedding_norm:
                tensor = F.rms_norm(tensor.float(), tensor.shape[-1:], eps=options.norm_eps).to(tensor.dtype)
            yield f"model.{own}", tensor


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
    licence = (
        "this model began as an imported model, and the licence of that model applies."
        if is_imported
        else "not specified; add the licence before publishing the model."
    )
    return _CARD.format(table=table, architecture=architecture, context=context, beginning=beginning, licence=licence)


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
    # The numbers of updates are those of the first stage.
    options = [f"{name} {value}".strip() for name, value in run["train_options"].items() if name not in UPDATE_COUNTS]
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
