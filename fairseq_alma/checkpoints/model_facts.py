"""Compute the number of parameters, the number of experts and the FLOPs per token of the model in a checkpoint.

FLOPs depend only on ``tokens_per_sample`` and on names and shapes of the weights. The output projection of attention
is ``out_proj`` in ``alma_switch_lm`` and ``o_proj`` in ``alma_transformer_lm``. Stacked experts have shape (E, …).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Union

from fairseq_alma.checkpoints.checkpoint_file import ENSEMBLE_ARCH, Weights, read_checkpoint
from fairseq_alma.checkpoints.ensemble_file import members_of
from fairseq_alma.checkpoints.model_options import SWITCH_SIZES, TRANSFORMER_SIZES
from fairseq_alma.errors import AlmaError


@dataclass(frozen=True)
class ModelFacts:
    """Number of parameters, number of experts and FLOPs per token of a model.

    FLOPs include only matrix products. A multiply-add is two FLOPs, as in ``torch.utils.flop_counter``. FLOPs of
    attention include masked positions (complete T x T products). A token uses one expert of each Switch layer.
    """

    num_params: int  # number of parameters; a shared parameter is counted once
    num_experts: int  # number of experts in each Switch layer; 1 for a dense model
    test_flops_per_token: int  # FLOPs of a forward pass per token
    num_members: int = 1  # number of members of an ensemble; 1 for a single model


def describe_checkpoint(path: Union[str, Path]) -> ModelFacts:
    """Return sizes and FLOPs of a checkpoint's model. Raises AlmaError as `read_checkpoint` and `describe_model` do."""
    checkpoint = read_checkpoint(path)
    return describe_model(checkpoint["cfg"]["model"], checkpoint["model"], Path(path))


def describe_model(config: Mapping[str, Any], weights: Weights, path: Path) -> ModelFacts:
    """Return sizes and FLOPs of a model, given ``cfg.model`` and ``model`` of the checkpoint ``path``.

    For an ensemble, parameters and FLOPs are sums over the members, and ``num_experts`` is the maximum.

    Raises:
        AlmaError: the architecture is not a language model of this package, or a member's file is missing or changed.
    """
    if config["_name"] == ENSEMBLE_ARCH:
        members = members_of(config, weights, path.parent)
        facts = [describe_model(member.config, member.weights, member.file or path) for member in members]
        return ModelFacts(
            num_params=sum(each.num_params for each in facts),
            num_experts=max(each.num_experts for each in facts),
            test_flops_per_token=sum(each.test_flops_per_token for each in facts),
            num_members=len(facts),
        )
    if config["_name"] not in (*SWITCH_SIZES, *TRANSFORMER_SIZES):
        raise AlmaError(f"{path}: cannot count FLOPs of {config['_name']}; train alma_transformer_lm or alma_switch_lm")
    num_experts, flops = 1, 0
    for name, tensor in weights.items():
        if tensor.dim() == 3:
            num_experts = max(num_experts, len(tensor))
            flops += 2 * tensor.numel() // len(tensor)
        elif tensor.dim() == 2 and not name.endswith("bias") and ".embed_" not in name:
            flops += 2 * tensor.numel()
            if name.endswith(("o_proj.weight", "out_proj.weight")):
                flops += 2 * 2 * config["tokens_per_sample"] * tensor.size(1)
    unique = {tensor.data_ptr(): tensor.numel() for tensor in weights.values()}
    return ModelFacts(sum(unique.values()), num_experts, flops)
