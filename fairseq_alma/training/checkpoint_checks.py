"""Whether a checkpoint fits a stream and the model that a command builds, so that a wrong one gets one clear line."""

from typing import Any

import torch
from fairseq.models import ARCH_MODEL_NAME_REGISTRY

from fairseq_alma.checkpoints.checkpoint_file import Checkpoint
from fairseq_alma.checkpoints.shared_outputs import check_dictionary
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError

SHAPE_OPTIONS = (
    "num_members",
    "member_arch",
    "num_experts",
    "gate_trees",
    "moe_freq",
    "decoder_layers",
    "decoder_embed_dim",
    "decoder_ffn_embed_dim",
    "decoder_attention_heads",
    "no_scale_embedding",
    "activation_fn",
    "width",
    "hidden_layers",
    "channels",
    "layer_channels",
)
"""Options of the model that a checkpoint to start from must share."""


def check_start(checkpoint: Checkpoint, path: str, model_cfg: Any, stream: Stream) -> None:
    """Raise AlmaError if a stage cannot start from a checkpoint: other architecture, sizes or vocabulary.

    Args:
        checkpoint: its content.
        path: its name, for the message.
        model_cfg: options of the model that is about to be built.
        stream: the stream that it will be trained on.
    """
    check_dictionary(checkpoint, path, stream)
    check_architecture(checkpoint, path, model_cfg)


def check_architecture(checkpoint: Checkpoint, path: str, model_cfg: Any) -> None:
    """Raise AlmaError if a checkpoint to start from has another architecture or other sizes; as `check_start`."""
    found = checkpoint["cfg"]["model"]
    kinds = [ARCH_MODEL_NAME_REGISTRY.get(config["_name"]) for config in (found, model_cfg)]
    if kinds[0] != kinds[1]:
        raise AlmaError(
            f"{path}: holds an {found['_name']}, the command builds an {model_cfg['_name']}; give --arch "
            f"{found['_name']}, or start from another checkpoint"
        )
    given = {name: model_cfg[name] for name in SHAPE_OPTIONS if name in model_cfg and model_cfg[name] is not None}
    differing = [name for name, value in given.items() if name in found and found[name] != value]
    if differing:
        flags = " ".join(_flag(name, found[name]) for name in differing)
        raise AlmaError(f"{path}: its model has other sizes than the command; give {flags}")


def _flag(name: str, value: Any) -> str:
    option = f"--{name.replace('_', '-')}"
    return f"{'' if value else 'no '}{option}" if isinstance(value, bool) else f"{option} {value!r}"


def check_weights(checkpoint: Checkpoint, path: str, model: torch.nn.Module) -> None:
    """Raise AlmaError if a model of this package differs from that of a checkpoint to start from in any weight's size.

    `check_architecture` knows which option to name; this is for what it does not see, as options of a model's members.
    """
    if not checkpoint["cfg"]["model"]["_name"].startswith("alma_"):
        return
    there = {name: tuple(tensor.shape) for name, tensor in checkpoint["model"].items()}
    here = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    differing = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    if differing:
        first = differing[0]
        raise AlmaError(
            f"{path}: its model has other sizes than the command builds ({first} is {there.get(first, 'missing')} "
            f"there, {here.get(first, 'missing')} here); give the options that it was trained with"
        )
