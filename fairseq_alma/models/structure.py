"""The structure of a checkpoint's model, without its weights: parameters in their order, Switch layers by type."""

from types import SimpleNamespace
from typing import Any, Mapping

import torch
from fairseq.data import Dictionary
from torch import Size, nn

from fairseq_alma.models.alma_switch_lm import AlmaSwitchLM, AlmaSwitchLMConfig
from fairseq_alma.modules.moe.switch_layer import SwitchLayer


def build_from_config(config: Mapping[str, Any], vocab_size: int, device: str = "meta") -> AlmaSwitchLM:
    """Build a Switch language model with random weights, or, on ``meta``, one that holds no memory.

    Args:
        config: ``cfg["model"]`` of a checkpoint.
        vocab_size: number of symbols, fairseq's four included.
        device: where its weights are.
    """
    dictionary = Dictionary()
    for unit in range(vocab_size - len(dictionary)):
        dictionary.add_symbol(f"unit{unit}")
    known = AlmaSwitchLMConfig.__dataclass_fields__
    options = AlmaSwitchLMConfig(**{name: value for name, value in config.items() if name in known})
    with torch.device(device):
        return AlmaSwitchLM.build_model(options, SimpleNamespace(source_dictionary=dictionary))


def parameter_shapes(model: nn.Module) -> dict[str, Size]:
    """Return names and shapes of all parameters, shared ones once, in the order in which the optimizer numbers them."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def switch_layer_names(model: nn.Module) -> list[str]:
    """Return the names of all Switch layers, in order."""
    return [name for name, module in model.named_modules() if isinstance(module, SwitchLayer)]
