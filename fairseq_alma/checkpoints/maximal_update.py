"""Maximal-update parametrization: for learning rates that move little with the width and depth of a Switch model.

Yang et al. 2022 (Tensor Programs V) for widths, Dey et al. 2025 (CompleteP, alpha = 1) for depths, written as factors
in the forward pass and the initialisation, so that optimizers, checkpoints and growth stay as they are: Adam's updates
of a stored weight do not depend on the factor that it is used with. At width 128 and 4 layers, the size of
``alma_switch_lm_tiny``, all factors are 1. Heads should be equally wide in all sizes, as in those of the recipe.

Letters: M model dim, L layers, r = M / 128.
"""

import math
from typing import Any, Iterable, Mapping, NamedTuple

from torch import Tensor

BASE_WIDTH, BASE_LAYERS = 128, 4
_LIKE_INPUTS = ("embed_tokens", "embed_positions", "output_projection", "gate.weight")


class UpdateFactors(NamedTuple):
    """Factors of one size of model; all 1: the usual parametrization.

    Attributes:
        features: of what a layer norm hands to matrices, 1 / r.
        branch: of what is added to the residual stream, 1 / r for its last matrix and 4 / L.
        embedding_width: M of the factor of embeddings, its square root.
    """

    features: float
    branch: float
    embedding_width: int


def update_factors(width: int, layers: int, is_on: bool) -> UpdateFactors:
    """Return the factors of a model's width and number of layers."""
    if not is_on:
        return UpdateFactors(1.0, 1.0, width)
    return UpdateFactors(BASE_WIDTH / width, BASE_WIDTH / width * BASE_LAYERS / layers, BASE_WIDTH)


def scale_first_weights(named: Iterable[tuple[str, Tensor]], width: int) -> None:
    """Let random weights begin as they do at width 128, once the factors of the forward pass are taken off.

    Args:
        named: the model's, as drawn for this width; changed in place.
        width: M.
    """
    ratio = width / BASE_WIDTH
    for name, tensor in named:
        if "norm" not in name and not name.endswith("bias"):
            tensor.data.mul_(math.sqrt(ratio) if any(part in name for part in _LIKE_INPUTS) else ratio)


def folded(weights: Mapping[str, Tensor], options: Any) -> dict[str, Tensor]:
    """Return the weights of the same function in the usual parametrization: for a folder that transformers reads.

    Args:
        weights: of a checkpoint with ``options.mup``.
        options: of its architecture.
    """
    width, layers = options.decoder_embed_dim, options.decoder_layers
    factors = update_factors(width, layers, True)
    # Input and output embeddings are one tensor: what the input takes off, the last layer norm gives back.
    embeddings = 1.0 if options.no_scale_embedding else math.sqrt(BASE_WIDTH / width)
    tokens = weights["decoder.embed_tokens.weight"] * embeddings
    found = dict(weights)
    for name, tensor in weights.items():
        if name.endswith(("embed_tokens.weight", "output_projection.weight")):
            found[name] = tokens
        elif name.startswith("decoder.layer_norm."):
            found[name] = tensor * (factors.features / embeddings)
        elif any(part in name for part in (".out_proj.", ".fc2")):
            found[name] = tensor * factors.branch
        elif any(part in name for part in (".qkv_proj.weight", ".fc1.weight", ".fc1_weight", ".gate.weight")):
            found[name] = tensor * factors.features
    return found
