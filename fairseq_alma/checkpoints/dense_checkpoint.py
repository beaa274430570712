"""A dense language model of stock fairseq as a Switch language model with one expert per Switch layer.

That model computes the same function: a gate over one expert always gives it the weight 1. Growth starts from there.
"""

from pathlib import Path
from typing import Any, Mapping

import torch
from torch import Tensor

from fairseq_alma.checkpoints.architecture import TRANSFORMER_LMS
from fairseq_alma.checkpoints.checkpoint_file import Checkpoint
from fairseq_alma.checkpoints.model_options import DenseOptions, one_expert_options
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import has_experts

# What transformer_lm can be told and alma_switch_lm has no part for: option, value that can be converted.
NEEDED = (
    ("share_decoder_input_output_embed", True, "--share-decoder-input-output-embed"),
    ("adaptive_input", False, "no --adaptive-input"),
    ("character_embeddings", False, "no --character-embeddings"),
    ("adaptive_softmax_cutoff", None, "no --adaptive-softmax-cutoff"),
    ("no_token_positional_embeddings", False, "no --no-token-positional-embeddings"),
    ("no_decoder_final_norm", False, "no --no-decoder-final-norm"),
    ("decoder_normalize_before", True, "a pre-norm decoder"),
    ("layernorm_embedding", False, "no --layernorm-embedding"),
)
SAME = (
    "activation_fn",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "decoder_embed_dim",
    "decoder_ffn_embed_dim",
    "decoder_layers",
    "decoder_attention_heads",
    "max_target_positions",
    "no_scale_embedding",
)


def from_transformer_lm(checkpoint: Checkpoint, path: str, options: DenseOptions, seed: int) -> Checkpoint:
    """Convert a checkpoint of stock ``transformer_lm``.

    Args:
        checkpoint: the source; not altered.
        path: its name, for messages.
        options: which layers get experts.
        seed: of the gates' weights.

    Returns:
        A checkpoint of ``alma_switch_lm`` with one expert, without optimizer state.

    Raises:
        AlmaError: if the model has parts that ``alma_switch_lm`` has not.
    """
    config = checkpoint["cfg"]["model"]
    _require_parts(config, path, "cannot grow")
    options.require_experts(config["decoder_layers"])
    weights = _convert_weights(checkpoint["model"], config["decoder_layers"], options.every, seed)
    converted = {**checkpoint, "model": weights}
    converted["cfg"] = {**checkpoint["cfg"], "model": _convert_config(config, options.every)}
    converted.pop("last_optimizer_state", None)
    return converted


def is_transformer_lm(config: Mapping[str, Any]) -> bool:
    """Tell whether ``cfg.model`` is that of a dense language model of stock fairseq."""
    return config["_name"] in TRANSFORMER_LMS


def without_experts(config: Mapping[str, Any], weights: Mapping[str, Tensor], path: Path) -> tuple[Any, Any]:
    """Return options and weights of an ``alma_switch_lm`` without Switch layers that is a stock ``transformer_lm``.

    Args:
        config: ``cfg.model`` of the latter.
        weights: its ``model``.
        path: its file, for messages.

    Raises:
        AlmaError: if it has parts that ``alma_switch_lm`` has not.
    """
    _require_parts(config, str(path), "cannot be expressed as an alma_switch_lm")
    return _convert_config(config, 0), _convert_weights(weights, config["decoder_layers"], 0, seed=0)


def _require_parts(config: Mapping[str, Any], path: str, therefore: str) -> None:
    for name, value, wanted in NEEDED:
        if config.get(name, value) != value:
            raise AlmaError(f"{path}: a transformer_lm with {name} = {config[name]!r} {therefore}; it needs {wanted}")
    dims = {config["decoder_embed_dim"], config["decoder_input_dim"], config["decoder_output_dim"]}
    if len(dims) != 1:
        raise AlmaError(f"{path}: embedding, input and output dimensions differ ({sorted(dims)}); they must be equal")


def _convert_config(config: Mapping[str, Any], every: int) -> dict[str, Any]:
    return {
        "_name": "alma_switch_lm",
        **{name: config[name] for name in SAME},
        "decoder_sinusoidal_pos": not config["decoder_learned_pos"],
        "tokens_per_sample": config["tokens_per_sample"],
        **one_expert_options(every),
    }


def _convert_weights(old: Mapping[str, Tensor], num_layers: int, every: int, seed: int) -> dict[str, Tensor]:
    """Rename and stack: one projection for query, key and value, and expert 0 in place of fc1 and fc2."""
    generator = torch.Generator().manual_seed(seed)
    new = {name: tensor for name, tensor in old.items() if not name.startswith("decoder.layers.")}
    new.pop("decoder.version", None)
    for layer in range(num_layers):
        prefix = f"decoder.layers.{layer}."
        part = {name[len(prefix) :]: tensor for name, tensor in old.items() if name.startswith(prefix)}
        for kind in ("weight", "bias"):
            projections = [part.pop(f"self_attn.{letter}_proj.{kind}") for letter in "qkv"]
            new[f"{prefix}self_attn.qkv_proj.{kind}"] = torch.cat(projections)
        if has_experts(layer, every):
            for linear in ("fc1", "fc2"):
                for kind in ("weight", "bias"):
                    new[f"{prefix}switch.experts.{linear}_{kind}"] = part.pop(f"{linear}.{kind}").unsqueeze(0)
            expert = new[f"{prefix}switch.experts.fc1_weight"]
            gate = torch.empty(1, expert.size(2))
            torch.nn.init.xavier_uniform_(gate, generator=generator)
            new[f"{prefix}switch.gate.weight"] = gate.to(expert.dtype)
        new.update({f"{prefix}{name}": tensor for name, tensor in part.items()})
    return new
