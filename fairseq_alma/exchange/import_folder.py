"""Convert a Qwen3 or Qwen3-MoE folder to a checkpoint of ``alma_transformer_lm``, without running code of the folder.

Token u of the folder has id u + 4 in the checkpoint, as in a stream with the tokenizer of the folder. ``</s>`` replaces
the EOS token, so id u + 4 of this token is unused. This id and fairseq's other symbols have almost no probability (see
`data.tokens.absent_ids`).
"""

import json
import re
import shlex
from argparse import Namespace
from hashlib import sha256
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from fairseq_alma.checkpoints.checkpoint_file import (
    DICTIONARY_KEY,
    FLOATS,
    Checkpoint,
    refuse_other_shapes,
    untrained_checkpoint,
)
from fairseq_alma.checkpoints.model_options import DEFAULT_START, USUAL_FREQUENCY
from fairseq_alma.data.stream import Stream, file_sha256
from fairseq_alma.data.tokens import NUM_FAIRSEQ_SYMBOLS, StreamTokenizer
from fairseq_alma.errors import AlmaError
from fairseq_alma.exchange import ARCHITECTURE
from fairseq_alma.exchange.tokenizer_files import CONFIG, TOKENIZER, TOKENIZER_CONFIG
from fairseq_alma.files import read_json_object
from fairseq_alma.growth.gate_tree import has_experts
from fairseq_alma.text.transformer_lm import build_from_config
from fairseq_alma.training.stage_task import configuration_of

EMBEDDINGS, OUTPUTS = "model.embed_tokens.weight", "lm_head.weight"
_REMEDY = "give an unaltered folder of a qwen3 or qwen3_moe model"
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(\w+_proj)\.weight")


def import_folder(folder: Path, stream: Optional[Stream] = None) -> Checkpoint:
    """Convert a transformers folder to a checkpoint.

    Args:
        folder: folder with a model of type ``qwen3`` or ``qwen3_moe`` and its tokenizer.
        stream: stream for further training, prepared with the tokenizer of the folder; None: no further training.

    Raises:
        AlmaError: ``alma_transformer_lm`` does not support the model, a file is missing or damaged, or the tokenizers
            of folder and stream differ.
    """
    from transformers import AutoConfig

    found = read_json_object(folder / CONFIG, _REMEDY).get("model_type")
    if found not in ("qwen3", "qwen3_moe"):
        raise AlmaError(f"{folder / CONFIG}: expected model_type qwen3 or qwen3_moe, found {found!r:.60}; {_REMEDY}")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # Validation in transformers raises errors of several types.
        raise AlmaError(f"{folder / CONFIG}: damaged ({error}); {_REMEDY}") from error
    options = model_options(config, folder / CONFIG)
    tokenizer = StreamTokenizer(folder / TOKENIZER)
    if tokenizer.vocab_size > config.vocab_size:
        raise AlmaError(
            f"{folder}: expected a tokenizer with at most {config.vocab_size:,} tokens, as in the model, found "
            f"{tokenizer.vocab_size:,} tokens; {_REMEDY}"
        )
    dictionary = sha256(tokenizer.dictionary.encode()).hexdigest()
    if stream is not None and stream.tokenizer is not None:
        # Tokenizers with the same vocabulary can encode a text differently, for example with another normalizer.
        known = {stream.dictionary_sha256, *(file.sha256 for file in stream.tokenizer.files)}
        if not {dictionary, file_sha256(tokenizer.file)} <= known:
            raise AlmaError(
                f"--stream {stream.root}: expected the tokenizer of {folder}, found another tokenizer; prepare a "
                f"stream with alma-prep-text --tokenizer {shlex.quote(str(folder))}"
            )
    end = end_token(folder, config, tokenizer)
    # No other token is replaced: the tokenizer may write it, for example a padding token that is the unknown token.
    options["symbol_ids"] = json.dumps([None, None, end, None])
    try:
        weights = dict(_renamed(_read_weights(folder), end, config.tie_word_embeddings))
    except (IndexError, KeyError, RuntimeError) as error:  # Tensors are missing or have inconsistent shapes.
        raise AlmaError(f"{folder}: the weights do not match {CONFIG} ({error}); {_REMEDY}") from error
    refuse_other_shapes(
        weights, build_from_config(options, config.vocab_size + NUM_FAIRSEQ_SYMBOLS), str(folder), _REMEDY
    )
    args = Namespace(
        task="alma_lm",
        criterion="alma_switch_cross_entropy",
        data=None if stream is None else str(stream.root),
        tokens_per_sample=options["tokens_per_sample"],
        max_target_positions=options["max_target_positions"],
    )
    groups: Any = OmegaConf.to_container(configuration_of(args))
    return untrained_checkpoint({**groups, "model": options}, weights, {DICTIONARY_KEY: dictionary})


def model_options(config: Any, path: Path) -> dict[str, Any]:
    """Return the options (``cfg.model``) of an ``alma_transformer_lm`` equivalent to a transformers configuration.

    Args:
        config: configuration of type ``Qwen3Config`` or ``Qwen3MoeConfig``.
        path: configuration file, named in error messages.

    Raises:
        AlmaError: no options of ``alma_transformer_lm`` are equivalent to the configuration.
    """
    is_moe, heads, rope = config.model_type == "qwen3_moe", config.num_attention_heads, config.rope_parameters
    dense, layers = (config.mlp_only_layers or []) if is_moe else [], range(config.num_hidden_layers)
    every = config.decoder_sparse_step if is_moe else 1
    mixtures = [is_moe and layer not in dense and every > 0 and (layer + 1) % every == 0 for layer in layers]
    num_experts = config.num_experts if is_moe else 1
    kv_heads = config.num_key_value_heads or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    ffn = config.moe_intermediate_size if is_moe and all(mixtures) else config.intermediate_size
    of_experts = {"num_experts_per_tok": 1, "norm_topk_prob": False, "moe_intermediate_size": ffn} if is_moe else {}
    required: dict[str, tuple[Any, Any]] = {
        "hidden_act": (config.hidden_act, "silu"),
        "attention_bias": (config.attention_bias, False),
        "use_sliding_window": (config.use_sliding_window, False),
        "rope_type": (rope["rope_type"], "default"),
        "num_attention_heads modulo num_key_value_heads": (heads % kv_heads, 0),
        "head_dim modulo 2": (head_dim % 2, 0),
        "num_hidden_layers": (len(layers), max(1, len(layers))),
        "layer_types": (sorted({*(getattr(config, "layer_types", None) or ["full_attention"])}), ["full_attention"]),
        **{name: (getattr(config, name), value) for name, value in of_experts.items()},
    }
    if type(rope["rope_theta"]) not in (int, float):
        raise AlmaError(f"{path}: expected a number for rope_theta, found {rope['rope_theta']!r:.60}; correct the file")
    for name, (found, value) in required.items():
        if found != value:
            raise AlmaError(
                f"{path}: expected {name} {value!r} for {ARCHITECTURE}, found {found!r:.60}; give another model"
            )
    rules = (every for every in range(1, len(layers) + 1) if mixtures == [has_experts(each, every) for each in layers])
    every = next(rules, None) if num_experts > 1 else None if is_moe else min(USUAL_FREQUENCY, len(layers))
    if every is None:
        numbers = ", ".join(str(layer) for layer in layers if mixtures[layer])
        places = f"layers {numbers} (numbered from 0)" if numbers else "no layer"
        raise AlmaError(
            f"{path}: expected at least 2 experts in every n-th layer for {ARCHITECTURE}, found num_experts "
            f"{num_experts} in {places}; give another model"
        )
    return {
        "_name": ARCHITECTURE,
        "dropout": 0.0,
        "decoder_embed_dim": config.hidden_size,
        "decoder_ffn_embed_dim": ffn,
        "decoder_layers": len(layers),
        "decoder_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rope_theta": float(rope["rope_theta"]),
        "norm_eps": config.rms_norm_eps,
        "no_embedding_norm": True,
        "share_decoder_input_output_embed": config.tie_word_embeddings,
        "num_experts": num_experts,
        "moe_freq": every,
        "capacity_factor": 1.0,
        "eval_capacity_factor": 0.0,
        # the inverse of the formula in folder_config
        "balance_loss_weight": config.router_aux_loss_coef / sum(mixtures) if any(mixtures) else 0.01,
        "gate_trees": "",
        "checkpoint_activations": False,
        "compile": False,
        # Longer sequences would exceed the default batch size of fairseq-eval-lm.
        "tokens_per_sample": min(1024, config.max_position_embeddings),
        "max_target_positions": config.max_position_embeddings,
        **DEFAULT_START,
    }


def end_token(folder: Path, config: Any, tokenizer: StreamTokenizer) -> int:
    """Return the id of the EOS token of the folder. Raises AlmaError if the folder has no valid EOS token."""
    named = read_json_object(folder / TOKENIZER_CONFIG, _REMEDY) if (folder / TOKENIZER_CONFIG).is_file() else {}
    name, token = named.get("eos_token"), config.eos_token_id
    name = name.get("content") if isinstance(name, dict) else name
    if isinstance(name, str):
        token = tokenizer.pieces.index(name) if name in tokenizer.pieces else None
    token = token[0] if isinstance(token, list) and token else token
    if type(token) is not int or not 0 <= token < config.vocab_size:
        raise AlmaError(f"{folder}: expected an EOS token in {TOKENIZER_CONFIG} or {CONFIG}, found none; {_REMEDY}")
    return token


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of model.safetensors or, as transformers does without this file, of the files in its index."""
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    names, tensors = [file.name], dict[str, Tensor]()
    try:
        if not file.is_file() and index.is_file():
            file = index
            names = sorted({*json.loads(index.read_bytes())["weight_map"].values()})
        for file in [folder / name for name in names]:
            tensors |= load_file(file)
    except Exception as error:  # SafetensorError or OSError; errors of several types if the index is damaged
        raise AlmaError(
            f"{file}: missing or damaged ({error}); give a folder written by save_pretrained of transformers"
        ) from error
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise AlmaError(
                f"{folder}: expected floating-point weights, found {tensor.dtype} in {name[:100]}; "
                "give an unquantized model"
            )
    return tensors


def _renamed(tensors: Mapping[str, Tensor], end: int, is_tied: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for the checkpoint: stack experts, and add rows for fairseq's symbols to the embeddings."""
    sources = [end] * NUM_FAIRSEQ_SYMBOLS
    table = torch.cat([tensors[EMBEDDINGS][sources], tensors[EMBEDDINGS]])
    yield "decoder.embed_tokens.weight", table
    outputs = table if is_tied else torch.cat([tensors[OUTPUTS][sources], tensors[OUTPUTS]])
    yield "decoder.output_projection.weight", outputs
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        own = f"decoder.{name.removeprefix('model.')}"
        if found := _EXPERT.fullmatch(own):
            stacks.setdefault(f"{found[1]}{found[3]}", {})[int(found[2])] = tensor
        elif name not in (EMBEDDINGS, OUTPUTS):
            yield own, tensor
    for name, experts in stacks.items():
        yield name, torch.stack([experts[each] for each in range(len(experts))])
