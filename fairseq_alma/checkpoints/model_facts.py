"""Parameters, experts and operations per token of a checkpoint's model; of an ensemble the sum of its members'.

Reads the file, builds no model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Mapping, Union

from fairseq_alma.checkpoints.architecture import read_options
from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.checkpoints.ensemble_file import ENSEMBLE_ARCH, Weights, members_of
from fairseq_alma.checkpoints.model_options import TRANSFORMER_SIZES
from fairseq_alma.errors import AlmaError
from fairseq_alma.metrics import SwitchLMShape, TransformerLMShape


@dataclass(frozen=True)
class ModelFacts:
    """Figures of one model.

    Attributes:
        num_params: parameters that the checkpoint holds, shared ones once.
        num_experts: experts in each Switch layer; 1 for a dense model.
        train_flops_per_token: operations of a forward and a backward pass, per token.
        test_flops_per_token: operations of a forward pass, per token.
        num_members: single models that it consists of.
    """

    num_params: int
    num_experts: int
    train_flops_per_token: int
    test_flops_per_token: int
    num_members: int = 1


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
    name = config["_name"]
    if name == ENSEMBLE_ARCH:
        members = members_of(config, weights, path.parent)
        return _sum(describe_model(member.config, member.weights, member.file or path) for member in members)
    if name in TRANSFORMER_SIZES:
        return _facts(transformer_shape(config, weights))
    if not name.startswith("alma_switch_lm"):
        raise AlmaError(f"{path}: architecture {name} has no formula for FLOPs here; use --arch alma_switch_lm…")
    return _facts(shape_from_weights(weights, config["tokens_per_sample"]))


def transformer_shape(config: Mapping[str, Any], weights: Weights) -> TransformerLMShape:
    """Return the sizes of an ``alma_transformer_lm``."""
    gates = [tensor.size(0) for name, tensor in weights.items() if name.endswith(".mlp.gate.weight")]
    options = read_options(config)
    return TransformerLMShape(
        model_dim=options.decoder_embed_dim,
        ffn_dim=options.decoder_ffn_embed_dim,
        num_layers=options.decoder_layers,
        num_heads=options.decoder_attention_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        vocab_size=weights["decoder.embed_tokens.weight"].size(0),
        tokens_per_sample=options.tokens_per_sample,
        gate_rows=tuple(gates),
        num_experts=(options.num_experts,) * len(gates),
        shares_embeddings=options.share_decoder_input_output_embed,
    )


def _facts(shape: Union[SwitchLMShape, TransformerLMShape]) -> ModelFacts:
    return ModelFacts(
        num_params=shape.num_params,
        num_experts=max(shape.num_experts, default=1),
        train_flops_per_token=shape.train_flops_per_token,
        test_flops_per_token=shape.forward_flops_per_token,
    )


def _sum(members: Iterable[ModelFacts]) -> ModelFacts:
    facts = list(members)
    return ModelFacts(
        num_params=sum(each.num_params for each in facts),
        num_experts=max(each.num_experts for each in facts),
        train_flops_per_token=sum(each.train_flops_per_token for each in facts),
        test_flops_per_token=sum(each.test_flops_per_token for each in facts),
        num_members=sum(each.num_members for each in facts),
    )


def shape_from_weights(weights: Weights, tokens_per_sample: int) -> SwitchLMShape:
    """Return the sizes of a Switch language model, whose weights say all but the length of a sequence."""
    positions = weights.get("decoder.embed_positions.weight")
    vocab_size, model_dim = weights["decoder.embed_tokens.weight"].shape
    layers = {name.split(".")[2] for name in weights if name.startswith("decoder.layers.")}
    gates = [weights[name] for name in weights if name.endswith(".switch.gate.weight")]
    experts = [weights[name] for name in weights if name.endswith(".switch.experts.fc1_weight")]
    ffns = [weights[name] for name in weights if name.endswith(".fc1.weight")]
    return SwitchLMShape(
        model_dim=model_dim,
        ffn_dim=ffns[0].size(0) if ffns else experts[0].size(1),
        num_layers=len(layers),
        vocab_size=vocab_size,
        tokens_per_sample=tokens_per_sample,
        gate_rows=tuple(gate.size(0) for gate in gates),
        num_experts=tuple(expert.size(0) for expert in experts),
        learned_positions=0 if positions is None else positions.size(0),
    )
