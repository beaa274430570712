"""One line for weights that are not those of the model that they are loaded into, where fairseq shows a traceback."""

from typing import Any, Mapping

from torch import Tensor, nn

from fairseq_alma.checkpoints.model_weights import other_shapes
from fairseq_alma.errors import AlmaError


def refuse_other_weights(model: nn.Module, path: str) -> None:
    """Let a model raise AlmaError when it is given weights of other names or shapes than its own.

    Args:
        model: what will load a checkpoint, also a stock model.
        path: the checkpoint, for the message.
    """

    def compare(module: nn.Module, weights: Mapping[str, Tensor], prefix: str, *unused: Any) -> None:
        if not prefix:
            _compare(module, weights, path)

    model.register_load_state_dict_pre_hook(compare)


def _compare(model: nn.Module, weights: Mapping[str, Tensor], path: str) -> None:
    needed = {name: tensor.shape for name, tensor in model.state_dict().items()}
    found = {name: tensor.shape for name, tensor in weights.items() if name in needed or not _is_left_out(name)}
    if differing := other_shapes(found, needed):
        raise AlmaError(f"{path}: {differing}; give the stream that it was trained on, and an unaltered checkpoint")


def _is_left_out(name: str) -> bool:
    """Tell whether fairseq drops what has this name: positions that are computed, and the version of its layers."""
    return name.endswith((".embed_positions._float_tensor", ".embed_positions.weights", "decoder.version"))
