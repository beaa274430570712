"""Decoders of language models: what all of them have in common, and that of the Switch language model.

Letters: B sequences, T positions, M model dim, V vocabulary size.
"""

from typing import Any, Optional, Sequence

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models import FairseqIncrementalDecoder, FairseqLanguageModel
from fairseq.models.transformer import Embedding
from fairseq.modules import LayerNorm, PositionalEmbedding
from torch import Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.text.decoder_layer import DecoderLayer, IncrementalState, LayerShape, scaled_norm
from fairseq_alma.text.dropout import dropout


class FeatureDecoder(FairseqIncrementalDecoder):
    """A decoder that computes features first, then the output layer, which the criterion leaves out.

    A subclass defines ``extract_features`` and ``output_layer``.
    """

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: Optional[IncrementalState] = None,
        features_only: bool = False,
        is_padded: bool = True,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Predict the next token at every position.

        Args:
            prev_output_tokens: (B, T) int64, padded on the right.
            encoder_out: unused; fairseq passes it to every decoder.
            incremental_state: cache of earlier positions; then only the newest position is computed (T = 1).
            features_only: return the (B, T, M) input of the output layer rather than its (B, T, V) output.
            is_padded: False: no position is padding, so that a GPU need not be asked.
            unused: further arguments of fairseq's generator (``src_lengths``).

        Returns:
            Logits or features, and a dictionary with ``routing`` and ``switch`` (`SwitchStatistics`), one entry for
            each Switch layer.
        """
        features, extra = self.extract_features(prev_output_tokens, encoder_out, incremental_state, is_padded=is_padded)
        return (features if features_only else self.output_layer(features)), extra


class MemberDecoder(FairseqIncrementalDecoder):
    """Several language models behind one decoder.

    fairseq keeps the cache of decoding step by step in one dictionary, under keys that belong to one module each, so
    all members share it; and it reorders the cache by walking over all modules.

    Args:
        dictionary: the vocabulary that all members share.
        members: the models.
    """

    members: Any  # an nn.ModuleList, which hides from mypy that these modules are language models

    def __init__(self, dictionary: Dictionary, members: Sequence[FairseqLanguageModel]) -> None:
        super().__init__(dictionary)
        self.members = nn.ModuleList(members)

    def max_positions(self) -> int:
        """Return the longest sequence that every member can take, in tokens."""
        return min(member.max_positions() for member in self.members)


class SwitchDecoder(FeatureDecoder):
    """A pre-norm Transformer decoder with shared input and output embeddings.

    Args:
        dictionary: the vocabulary.
        shape: sizes and probabilities of the layers.
        trees: for every layer the gate's choices, or None for a dense layer.
        max_positions: longest sequence, in tokens.
        learned_pos: learned positions rather than sinusoidal ones.
        checkpoint_activations: recompute the layers in the backward pass to save memory.
        embed_scale: what embeddings are multiplied with.
    """

    def __init__(
        self,
        dictionary: Dictionary,
        shape: LayerShape,
        trees: list[Optional[GateTree]],
        max_positions: int,
        learned_pos: bool = True,
        checkpoint_activations: bool = False,
        embed_scale: float = 1.0,
    ) -> None:
        super().__init__(dictionary)
        self.padding_idx = dictionary.pad()
        self.dropout = shape.dropout
        self.max_target_positions = max_positions
        self.checkpoint_activations = checkpoint_activations
        self.embed_scale = embed_scale
        self.feature_factor = shape.feature_factor
        self.embed_tokens = Embedding(len(dictionary), shape.model_dim, self.padding_idx)
        self.embed_positions = PositionalEmbedding(max_positions, shape.model_dim, self.padding_idx, learned_pos)
        self.layers = nn.ModuleList(DecoderLayer(shape, tree) for tree in trees)
        self.layer_norm = LayerNorm(shape.model_dim)
        self.output_projection = nn.Linear(shape.model_dim, len(dictionary), bias=False)
        self.output_projection.weight = self.embed_tokens.weight

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: Optional[IncrementalState] = None,
        is_padded: bool = True,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the (B, T, M) features; arguments as in `FeatureDecoder.forward`."""
        positions = self._positions(prev_output_tokens, incremental_state, is_padded)
        if incremental_state is not None:
            prev_output_tokens = prev_output_tokens[:, -1:]
        x = self.embed_scale * self.embed_tokens(prev_output_tokens) + positions
        x = dropout(x, self.dropout, self.training)
        padding = self._padding(prev_output_tokens) if is_padded else None
        extra: dict[str, Any] = {"attn": [None], "routing": [], "switch": []}
        for layer in self.layers:
            if self.checkpoint_activations and self.training:
                x, routing, statistics = torch.utils.checkpoint.checkpoint(layer, x, padding, use_reentrant=False)
            else:
                x, routing, statistics = layer(x, padding, incremental_state)
            if routing is not None:
                extra["routing"].append(routing)
                extra["switch"].append(statistics)
        return scaled_norm(self.layer_norm, x, self.feature_factor), extra

    def _positions(self, tokens: Tensor, incremental_state: Optional[IncrementalState], is_padded: bool) -> Tensor:
        """Return the embeddings of positions, (B, T, M); fairseq counts tokens to find out which are padding."""
        if is_padded or incremental_state is not None or not isinstance(self.embed_positions, nn.Embedding):
            return self.embed_positions(tokens, incremental_state=incremental_state)
        first = self.padding_idx + 1
        numbers = torch.arange(first, first + tokens.size(1), device=tokens.device).expand_as(tokens)
        return F.embedding(numbers, self.embed_positions.weight, self.padding_idx)

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
