"""Parameters, experts and operations per token of a checkpoint's model; of an ensemble the sum of its members'.

All of it is read off the weights, whose names `alma_switch_lm` and `alma_transformer_lm` share where it matters: what
ends in ``o_proj.weight`` or ``out_proj.weight`` is an attention's output, and experts are stacked, (E, …).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Mapping, Union

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.checkpoints.ensemble_file import ENSEMBLE_ARCH, Weights, members_of
from fairseq_alma.checkpoints.model_options import SWITCH_SIZES, TRANSFORMER_SIZES
from fairseq_alma.errors import AlmaError


@dataclass(frozen=True)
class ModelFacts:
    """Figures of one model.

    Of operations a multiplication and an addition count as two; only matrix products count, as in
    ``torch.utils.flop_counter``. A backward pass costs two forward passes.

    Attributes:
        num_params: parameters that the checkpoint holds, shared ones once.
        num_experts: experts in each Switch layer; 1 for a dense model.
        test_flops_per_token: operations of a forward pass, per token.
        num_members: single models that it consists of.
    """

    num_params: int
    num_experts: int
    test_flops_per_token: int
    num_members: int = 1

    @property
    def train_flops_per_token(self) -> int:
        """Operations of a forward and a backward pass, per token; recomputation and dropped tokens change nothing."""
        return 3 * self.test_flops_per_token


def describe_checkpoint(path: Union[str, Path]) -> ModelFacts:
    """Return the facts of the model in a checkpoint file.

    Raises:
        AlmaError: if it is no checkpoint, of an architecture without a formula here, or an ensemble with a member that
            is missing or changed.
    """
    checkpoint = read_checkpoint(path)
    return describe_model(checkpoint["cfg"]["model"], checkpoint["model"], Path(path))


def describe_model(config: Mapping[str, Any], weights: Weights, path: Path) -> ModelFacts:
    """Return the facts of a model.

    Args:
        config: its ``cfg.model``.
        weights: its ``model``.
        path: the file that holds it, for messages; paths of an ensemble's members start in its folder.
    """
    if config["_name"] == ENSEMBLE_ARCH:
        members = members_of(config, weights, path.parent)
        return _sum(describe_model(member.config, member.weights, member.file or path) for member in members)
    if config["_name"] not in (*SWITCH_SIZES, *TRANSFORMER_SIZES):
        raise AlmaError(f"{path}: architecture {config['_name']} has no formula for FLOPs here; use --arch alma_…")
    return facts_of_weights(weights, config["tokens_per_sample"])


def facts_of_weights(weights: Weights, tokens_per_sample: int) -> ModelFacts:
    """Return the facts of a language model.

    Each token passes through one expert of a stack. Attention is counted over all T positions, as the unmasked products
    of a sequence of T tokens.

    Args:
        weights: by name.
        tokens_per_sample: T, length of a training or test sequence.
    """
    num_experts, flops = 1, 0
    for name, tensor in weights.items():
        if tensor.dim() == 3:
            num_experts = max(num_experts, len(tensor))
            flops += 2 * tensor.numel() // len(tensor)
        elif tensor.dim() == 2 and not name.endswith("bias") and ".embed_" not in name:
            flops += 2 * tensor.numel()
            if name.endswith(("o_proj.weight", "out_proj.weight")):
                flops += 2 * 2 * tokens_per_sample * tensor.size(1)
    unique = {tensor.data_ptr(): tensor.numel() for tensor in weights.values()}
    return ModelFacts(sum(unique.values()), num_experts, flops)


def _sum(members: Iterable[ModelFacts]) -> ModelFacts:
    facts = list(members)
    return ModelFacts(
        num_params=sum(each.num_params for each in facts),
        num_experts=max(each.num_experts for each in facts),
        test_flops_per_token=sum(each.test_flops_per_token for each in facts),
        num_members=sum(each.num_members for each in facts),
    )
