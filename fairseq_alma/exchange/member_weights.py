"""What a checkpoint's language model consists of: single models with their sizes and weights, and how they combine.

An ensemble of ensembles is one ensemble, its weights multiplied; models that were trained jointly are a group whose
logits are averaged. No fairseq.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Sequence

import torch
from torch import Tensor

from fairseq_alma.checkpoints import JOINT_MODEL
from fairseq_alma.checkpoints.architecture import SwitchOptions, joint_member_options, read_options
from fairseq_alma.checkpoints.ensemble_file import ENSEMBLE_ARCH, Weights, members_of, weights_of_member
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree, trees_of_layers

ACTIVATIONS = {"gelu_accurate": "gelu_tanh", "gelu_fast": "gelu_tanh"}
_NAMES = {
    "embed_tokens.weight": "embed_tokens.weight",
    "embed_positions.weight": "embed_positions.weight",
    "layer_norm.weight": "norm.weight",
    "layer_norm.bias": "norm.bias",
}
_IN_LAYERS = (
    ("self_attn_layer_norm.", "attention_norm."),
    ("self_attn.qkv_proj.", "qkv_proj."),
    ("self_attn.out_proj.", "out_proj."),
    ("final_layer_norm.", "ffn_norm."),
)


@dataclass(frozen=True)
class Group:
    """Models whose logits are averaged; of one that was trained alone, that one.

    Attributes:
        weight: what its probabilities count among those of all groups.
        options: sizes of each of its models; they are of one shape.
        members: the weights of each model.
    """

    weight: float
    options: SwitchOptions
    members: Sequence[Weights]


def groups_of(config: Mapping[str, Any], weights: Weights, path: Path, weight: float = 1.0) -> Iterator[Group]:
    """Yield the groups of a checkpoint's model.

    Args:
        config: its ``cfg.model``.
        weights: its ``model``.
        path: its file, for messages; paths of an ensemble's members start in its folder.
        weight: what it counts in the ensemble around it.

    Raises:
        AlmaError: a part of it is no Switch language model.
    """
    name = config["_name"]
    if name == ENSEMBLE_ARCH:
        for entry, found in zip(config["members"], members_of(config, weights, path.parent), strict=True):
            if entry["weight"] > 0:
                yield from groups_of(found.config, found.weights, found.file or path, weight * entry["weight"])
        return
    options = read_options(config)
    if name == JOINT_MODEL and config["member_arch"].startswith("alma_switch_lm"):
        parts = [weights_of_member(weights, index) for index in range(options.num_members)]
        yield _group(weight, joint_member_options(options), parts)
    elif isinstance(options, SwitchOptions):
        yield _group(weight, options, [weights])
    else:
        raise AlmaError(f"{path}: architecture {name} is no language model; give a checkpoint of one")


def _group(weight: float, options: SwitchOptions, members: Sequence[Weights]) -> Group:
    return Group(weight, options, members)


def member_sizes(options: SwitchOptions) -> dict[str, Any]:
    """Return the sizes of a single model as `modeling_alma.AlmaMember` takes them."""
    return {
        "hidden_size": options.decoder_embed_dim,
        "intermediate_size": options.decoder_ffn_embed_dim,
        "num_layers": options.decoder_layers,
        "num_heads": options.decoder_attention_heads,
        "activation": ACTIVATIONS.get(options.activation_fn, options.activation_fn),
        "positions": "sinusoidal" if options.decoder_sinusoidal_pos else "learned",
        "max_positions": options.max_target_positions or options.tokens_per_sample,
        "scale_embedding": not options.no_scale_embedding,
        "dropout": options.dropout,
        "attention_dropout": options.attention_dropout,
        "activation_dropout": options.activation_dropout,
        "capacity_factor": options.capacity_factor,
        "eval_capacity_factor": options.eval_capacity_factor,
        "gates": _gates(options),
    }


def _gates(options: SwitchOptions) -> list[Any]:
    return [None if tree is None else _gate(tree) for tree in trees_of_layers(options)]


def _gate(tree: GateTree) -> dict[str, Any]:
    if tree.is_flat:
        return {"num_experts": tree.num_experts}
    choices = [[choice.start, choice.stop, choice.parent_row] for choice in tree.choices]
    return {"num_experts": tree.num_experts, "choices": choices, "row_expert": list(tree.row_expert)}


def named_weights(weights: Weights, number: int, path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield a single model's weights under their names in a folder; shared ones once.

    Args:
        weights: as in a checkpoint.
        number: of the model, from 0.
        path: of its file, for messages.

    Raises:
        AlmaError: output embeddings are not the input embeddings.
    """
    embeddings = weights["decoder.embed_tokens.weight"]
    outputs = weights["decoder.output_projection.weight"]
    if outputs.data_ptr() != embeddings.data_ptr() and not torch.equal(outputs, embeddings):
        raise AlmaError(f"{path}: its output embeddings are not its input embeddings; give an unaltered checkpoint")
    for name, tensor in weights.items():
        if (own := folder_name(name)) is not None:
            yield f"members.{number}.{own}", tensor


def folder_name(name: str) -> Optional[str]:
    """Return a weight's name in a folder; None: it is not there, as the output embeddings."""
    own = name.removeprefix("decoder.")
    if not own.startswith("layers."):
        return _NAMES.get(own)
    for before, after in _IN_LAYERS:
        own = own.replace(f".{before}", f".{after}")
    return own
