"""Export a checkpoint of ``alma_transformer_lm`` to a Hugging Face folder (Qwen3, or Qwen3-MoE with experts).

Most weight names differ only in the prefix: ``decoder.`` in the checkpoint, ``model.`` in the folder. The export splits
stacked experts into separate tensors. The output of the embedding norm depends only on the token, so the export applies
the norm to the rows of the embedding matrix.
"""

import errno
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterator, Mapping, Optional

import torch.nn.functional as F
from torch import Tensor

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint, refuse_other_shapes
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import EOS, NUM_FAIRSEQ_SYMBOLS, StreamTokenizer, TokenFile
from fairseq_alma.errors import AlmaError
from fairseq_alma.exchange import refuse_model
from fairseq_alma.exchange.model_card import model_card
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
from fairseq_alma.text.stage_checkpoints import describe_model
from fairseq_alma.text.transformer_lm import build_from_config

WEIGHTS = "model.safetensors"
CHECKED_TOKENS = 200_000  # number of tokens of the test set that the exported tokenizer must reproduce
_REMEDY = "give an unaltered checkpoint"
_STACK = re.compile(r"(.*\.mlp\.experts\.)(\w+_proj)")


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
        vocabulary = vocabulary_of(tokenizer, context, options.symbol_ids)
        context = max(context, vocabulary.context)
        settings = folder_config(options, weights, vocabulary, context)
        replaced = json.loads(options.symbol_ids) if options.symbol_ids else range(NUM_FAIRSEQ_SYMBOLS)
        beginning = beginning_of(vocabulary.files[TOKENIZER], replaced[EOS])
        tensors = dict(folder_weights(weights, options, settings["tie_word_embeddings"], vocabulary.rows))
        num_params = sum(tensor.numel() for tensor in tensors.values())  # without fairseq's symbols
        facts = replace(describe_model(config, weights, path), num_params=num_params)
    except (AttributeError, KeyError, TypeError) as error:
        raise AlmaError(f"{path}: the configuration is incomplete ({error}); {_REMEDY}") from error
    if not options.symbol_ids:
        text = misread_text(json.loads(vocabulary.files[TOKENIZER]), tokenizer, _test_texts(stream, tokenizer))
        if text is not None:
            raise AlmaError(
                f"{tokenizer.file}: this tokenizer and its export encode {text[:40]!r} differently; {EXPORTABLE}"
            )
    architecture = settings["architectures"][0]
    with work_folder(out, "alma-export") as folder:
        write_tensors(tensors, folder / WEIGHTS)
        texts = {CONFIG: json.dumps(settings, indent=2) + "\n", **vocabulary.files}
        texts["README.md"] = model_card(
            path, stream, facts, architecture, context, beginning, is_imported=bool(options.symbol_ids)
        )
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        size = (folder / WEIGHTS).stat().st_size
        publish(folder, out)
    experts = f"{facts.num_experts} experts, " if facts.num_experts > 1 else ""
    sizes = f"{num_params:,} parameters, {experts}{settings['vocab_size']:,} tokens, {size / 1e6:,.1f} MB"
    return f"{out}: {architecture}, {sizes}"


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
        full = "No space left" in str(error) or "os error 28" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error
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
