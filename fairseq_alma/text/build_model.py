"""Language models of this package, built from the configuration that a checkpoint has, and what growth asks of them."""

from types import SimpleNamespace
from typing import Any, Mapping

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from torch import Size, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.moe.switch_layer import SwitchLayer


def build_from_config(config: Mapping[str, Any], vocab_size: int, device: str = "meta") -> Any:
    """Build a language model with random weights, or, on ``meta``, one that holds no memory.

    Args:
        config: ``cfg["model"]`` of a checkpoint of ``alma_switch_lm`` or ``alma_transformer_lm``.
        vocab_size: tokens of the vocabulary, fairseq's four included.
        device: where its weights are.
    """
    dictionary = Dictionary()
    for token in range(vocab_size - len(dictionary)):
        dictionary.add_symbol(f"token{token}")
    name = ARCH_MODEL_NAME_REGISTRY[config["_name"]]
    kind = MODEL_DATACLASS_REGISTRY[name]
    options = kind(**{name: value for name, value in config.items() if name in kind.__dataclass_fields__})
    with torch.device(device):
        return MODEL_REGISTRY[name].build_model(options, SimpleNamespace(source_dictionary=dictionary))


def parameter_shapes(model: nn.Module) -> dict[str, Size]:
    """Return names and shapes of all parameters, shared ones once, in the order in which the optimizer numbers them."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def gate_trees_of(model: nn.Module) -> dict[str, GateTree]:
    """Return the names of all Switch layers, in order, and their gates' trees."""
    return {name: module.gate.tree for name, module in model.named_modules() if isinstance(module, SwitchLayer)}
