"""``alma-export``: a checkpoint of ``alma_transformer_lm`` as a folder of Qwen3, or with experts Qwen3-MoE. No fairseq.

Weights have the names of those architectures already. The norm after the embeddings is a function of the token alone,
so it is applied to their rows; each expert's part of a stack becomes a tensor of its own.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterator, Mapping, Optional

import torch.nn.functional as F
from torch import Tensor

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.checkpoints.model_facts import ModelFacts, describe_model
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import NUM_FAIRSEQ_SYMBOLS, StreamTokenizer, TokenFile
from fairseq_alma.errors import AlmaError
from fairseq_alma.exchange.exportable import refuse_model
from fairseq_alma.exchange.model_card import model_card
from fairseq_alma.exchange.tensor_file import WEIGHTS, differing_shapes, write_tensors
from fairseq_alma.exchange.tokenizer_files import (
    CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    Vocabulary,
    check_same_ids,
    vocabulary_of,
)
from fairseq_alma.files import publish, work_folder
from fairseq_alma.growth.gate_tree import has_experts
from fairseq_alma.runs.lookup import stream_of

CHECKED_TOKENS = 200_000  # of the test set, on which both forms of a tokenizer are compared
_STACK = re.compile(r"(.*\.mlp\.experts\.)(\w+_proj)")


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        facts: of the model.
        architecture: name of the class in transformers.
        num_tokens: tokens of the vocabulary.
        size: of the weights' file, in bytes.
    """

    facts: ModelFacts
    architecture: str
    num_tokens: int
    size: int


def export_model(path: Path, out: Path, stream_folder: Optional[Path] = None) -> Exported:
    """Write a language model's checkpoint as a folder of a stock architecture of transformers.

    Args:
        path: the checkpoint.
        out: the folder, which must not be there.
        stream_folder: the stream whose tokenizer the model knows; None: the one that it was trained on.

    Raises:
        AlmaError: no such architecture computes what the model does, or the stream has another dictionary or a
            tokenizer that cannot be exported; nothing is written then.
    """
    checkpoint = read_checkpoint(path)
    config, weights = checkpoint["cfg"]["model"], checkpoint["model"]
    refuse_model(str(path), config["_name"], bool(config.get("gate_trees")), config.get("eval_capacity_factor") or 0)
    stream = stream_of(checkpoint, path, stream_folder)
    tokenizer = StreamTokenizer.open(stream.root)
    try:
        options = SimpleNamespace(**config)
        context = min(filter(None, (options.tokens_per_sample, options.max_target_positions)))
        needed, found = tokenizer.vocab_size + NUM_FAIRSEQ_SYMBOLS, weights["decoder.embed_tokens.weight"].size(0)
        if found != needed:
            raise AlmaError(
                f"{path}: a vocabulary of {found:,} tokens, the stream {stream.root} has {needed:,} with fairseq's "
                "four; give the stream it was trained on as --stream"
            )
        has_bos = bool((checkpoint["cfg"].get("task") or {}).get("add_bos_token"))
        vocabulary = vocabulary_of(tokenizer, context, options.symbol_ids, has_bos)
        context = max(context, vocabulary.context)
        settings = config_of(options, weights, vocabulary, context)
        tensors = dict(named_weights(weights, options, vocabulary.rows))
        differing = differing_shapes(tensors, config, settings["vocab_size"], _mixtures(options))
        facts = describe_model(config, weights, path)
    except (AttributeError, KeyError, TypeError) as error:
        differing = f"its configuration is incomplete ({error})"
    if differing:
        raise AlmaError(f"{path}: {differing}; give an unaltered checkpoint")
    if not options.symbol_ids:
        check_same_ids(vocabulary.files[TOKENIZER], tokenizer, _texts(stream, tokenizer))
    (architecture,) = settings["architectures"]
    first = json.loads(vocabulary.files.get(TOKENIZER_CONFIG, "{}")).get("bos_token")
    with work_folder(out, "alma-export") as folder:
        write_tensors(tensors, folder / WEIGHTS)
        card = model_card(path, stream, facts, architecture, context, first)
        content = {CONFIG: json.dumps(settings, indent=2) + "\n", "README.md": card}
        for name, text in (content | dict(vocabulary.files)).items():
            (folder / name).write_text(text, encoding="utf-8")
        publish(folder, out)
    return Exported(facts, architecture, settings["vocab_size"], (out / WEIGHTS).stat().st_size)


def _texts(stream: Stream, tokenizer: StreamTokenizer) -> Iterator[str]:
    """Yield documents of the test set."""
    file = TokenFile(stream.prefix(stream.split("test")))
    start = 0
    for size in file.sizes.tolist():
        tokens = [token - NUM_FAIRSEQ_SYMBOLS for token in file.ids[start : start + size].tolist()]
        yield tokenizer.decode_batch([[token for token in tokens if token >= 0]])[0]
        start += size
        if start > CHECKED_TOKENS:
            return


def config_of(options: Any, weights: Mapping[str, Tensor], vocabulary: Vocabulary, context: int) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    table = weights["decoder.embed_tokens.weight"]
    mixtures = _mixtures(options)
    experts = {
        "num_experts": options.num_experts,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "moe_intermediate_size": options.decoder_ffn_embed_dim,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, here in enumerate(mixtures) if not here],
        "output_router_logits": False,
        # ours is summed over Switch layers, theirs is taken over the tokens of all of them
        "router_aux_loss_coef": options.balance_loss_weight * sum(mixtures),
    }
    return {
        "architectures": ["Qwen3MoeForCausalLM" if any(mixtures) else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if any(mixtures) else "qwen3",
        "dtype": str(table.dtype).removeprefix("torch."),
        "vocab_size": table.size(0) if vocabulary.rows is None else len(vocabulary.rows),
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
        "tie_word_embeddings": _is_tied(options),
        **(experts if any(mixtures) else {}),
        **vocabulary.special_ids,
    }


def _mixtures(options: Any) -> list[bool]:
    """Return whether each layer has experts."""
    return [options.num_experts > 1 and has_experts(layer, options.moe_freq) for layer in range(options.decoder_layers)]


def _is_tied(options: Any) -> bool:
    """Return whether one matrix serves as both embeddings still when the norm is folded into the rows of one."""
    return options.share_decoder_input_output_embed and options.no_embedding_norm


def named_weights(
    weights: Mapping[str, Tensor], options: Any, rows: Optional[list[int]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a folder; those that need no change stay where they are.

    Args:
        weights: the checkpoint's.
        options: its model's.
        rows: for each of the folder's tokens its row in the checkpoint; None: as there.
    """
    for name, tensor in weights.items():
        own = name.removeprefix("decoder.")
        if own in ("embed_tokens.weight", "output_projection.weight"):
            if rows is not None:
                tensor = tensor[rows]
            if own == "output_projection.weight":
                own = "" if _is_tied(options) else "lm_head.weight"
            elif not options.no_embedding_norm:
                tensor = F.rms_norm(tensor.float(), tensor.shape[-1:], eps=options.norm_eps).to(tensor.dtype)
        if stack := _STACK.fullmatch(own):
            for number, expert in enumerate(tensor):
                yield f"model.{stack[1]}{number}.{stack[2]}.weight", expert
        elif own:
            yield own if own == "lm_head.weight" else f"model.{own}", tensor
