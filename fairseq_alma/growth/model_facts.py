"""What a checkpoint's model is: parameters, experts, operations per token. Reads the file, builds no model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Union

from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.checkpoint_file import Checkpoint, read_checkpoint
from fairseq_alma.growth.gate_tree import parse_gate_trees
from fairseq_alma.metrics.flops import SwitchLMShape


@dataclass(frozen=True)
class ModelFacts:
    """Figures of one model.

    Attributes:
        num_params: parameters that the checkpoint holds, shared ones once.
        num_experts: experts in each Switch layer; 1 for a dense model.
        train_flops_per_token: operations of a forward and a backward pass, per token.
        test_flops_per_token: operations of a forward pass, per token.
    """

    num_params: int
    num_experts: int
    train_flops_per_token: int
    test_flops_per_token: int


def describe_checkpoint(path: Union[str, Path]) -> ModelFacts:
    """Return the facts of the model in a checkpoint file.

    Raises:
        AlmaError: if it is no checkpoint, or of an architecture without a formula here.
    """
    checkpoint = read_checkpoint(path)
    name = checkpoint["cfg"]["model"]["_name"]
    if not name.startswith("alma_switch_lm"):
        raise AlmaError(f"{path}: architecture {name} has no formula for FLOPs here; use --arch alma_switch_lm…")
    shape = switch_lm_shape(checkpoint)
    return ModelFacts(
        num_params=shape.num_params,
        num_experts=max(shape.num_experts, default=1),
        train_flops_per_token=shape.train_flops_per_token,
        test_flops_per_token=shape.forward_flops_per_token,
    )


def switch_lm_shape(checkpoint: Checkpoint) -> SwitchLMShape:
    """Return the sizes of a Switch language model from its checkpoint."""
    weights = checkpoint["model"]
    positions = weights.get("decoder.embed_positions.weight")
    return shape_from_config(
        checkpoint["cfg"]["model"],
        vocab_size=weights["decoder.embed_tokens.weight"].size(0),
        learned_positions=0 if positions is None else positions.size(0),
    )


def shape_from_config(config: Mapping[str, Any], vocab_size: int, learned_positions: int) -> SwitchLMShape:
    """Return the sizes that an ``alma_switch_lm`` configuration describes."""
    num_layers, moe_freq = config["decoder_layers"], config["moe_freq"]
    num_switch_layers = num_layers // moe_freq if moe_freq > 0 else 0
    trees = parse_gate_trees(config["gate_trees"], num_switch_layers, config["num_experts"])
    return SwitchLMShape(
        model_dim=config["decoder_embed_dim"],
        ffn_dim=config["decoder_ffn_embed_dim"],
        num_layers=num_layers,
        vocab_size=vocab_size,
        tokens_per_sample=config["tokens_per_sample"],
        gate_rows=tuple(tree.num_rows for tree in trees),
        num_experts=tuple(tree.num_experts for tree in trees),
        learned_positions=learned_positions,
    )
