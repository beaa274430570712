"""The decoder of the Switch language model: embeddings, layers, output projection.

Letters: B sequences, T positions, M model dim, V units of the vocabulary.
"""

import math
from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models.transformer import Embedding
from fairseq.modules import LayerNorm, PositionalEmbedding
from torch import Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.models.feature_decoder import FeatureDecoder
from fairseq_alma.modules.text.causal_self_attention import IncrementalState
from fairseq_alma.modules.text.decoder_layer import DecoderLayer, LayerShape


class SwitchDecoder(FeatureDecoder):
    """A pre-norm Transformer decoder with shared input and output embeddings.

    Args:
        dictionary: the vocabulary.
        shape: sizes and probabilities of the layers.
        trees: for every layer the gate's choices, or None for a dense layer.
        max_positions: longest sequence, in tokens.
        learned_pos: learned positions rather than sinusoidal ones.
        checkpoint_activations: recompute the layers in the backward pass to save memory.
        compile_layers: let ``torch.compile`` fuse what each layer does, in training.
    """

    def __init__(
        self,
        dictionary: Dictionary,
        shape: LayerShape,
        trees: list[Optional[GateTree]],
        max_positions: int,
        learned_pos: bool = True,
        checkpoint_activations: bool = False,
        compile_layers: bool = False,
    ) -> None:
        super().__init__(dictionary)
        self.padding_idx = dictionary.pad()
        self.dropout = shape.dropout
        self.max_target_positions = max_positions
        self.checkpoint_activations = checkpoint_activations
        self.embed_scale = math.sqrt(shape.model_dim)
        self.embed_tokens = Embedding(len(dictionary), shape.model_dim, self.padding_idx)
        self.embed_positions = PositionalEmbedding(max_positions, shape.model_dim, self.padding_idx, learned_pos)
        self.layers = nn.ModuleList(DecoderLayer(shape, tree) for tree in trees)
        self.compile_layers = compile_layers
        self._twins: dict[nn.Module, Callable[..., Any]] = {}
        self.layer_norm = LayerNorm(shape.model_dim)
        self.output_projection = nn.Linear(shape.model_dim, len(dictionary), bias=False)
        self.output_projection.weight = self.embed_tokens.weight

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: Optional[IncrementalState] = None,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the (B, T, M) features; arguments as in `FeatureDecoder.forward`."""
        positions = self.embed_positions(prev_output_tokens, incremental_state=incremental_state)
        if incremental_state is not None:
            prev_output_tokens = prev_output_tokens[:, -1:]
        x = self.embed_scale * self.embed_tokens(prev_output_tokens) + positions
        x = F.dropout(x, self.dropout, self.training)
        padding = self._padding(prev_output_tokens)
        extra: dict[str, Any] = {"attn": [None], "routing": [], "switch": []}
        for layer in map(self._compiled, self.layers) if self.compile_layers and self.training else self.layers:
            if self.checkpoint_activations and self.training:
                x, routing, statistics = torch.utils.checkpoint.checkpoint(layer, x, padding, use_reentrant=False)
            else:
                x, routing, statistics = layer(x, padding, incremental_state)
            if routing is not None:
                extra["routing"].append(routing)
                extra["switch"].append(statistics)
        return self.layer_norm(x), extra

    def _compiled(self, layer: nn.Module) -> Callable[..., Any]:
        """Return a layer's compiled twin, which is no module: checkpoints have the names that they always have."""
        if layer not in self._twins:
            self._twins[layer] = torch.compile(layer.forward)
        return self._twins[layer]

    def _padding(self, tokens: Tensor) -> Optional[Tensor]:
        """Return where padding is, or None on a CPU, where asking is cheap, if there is none."""
        padding = tokens.eq(self.padding_idx)
        return None if padding.device.type == "cpu" and not padding.any() else padding

    def output_layer(self, features: Tensor, **unused: Any) -> Tensor:
        """Project (…, M) features to (…, V) logits."""
        return self.output_projection(features)

    def max_positions(self) -> int:
        """Return the longest sequence that the positions allow, in tokens."""
        return min(self.max_target_positions, self.embed_positions.max_positions)
