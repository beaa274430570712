"""What the decoders of all language models here share: the cache of attention, and features before logits.

Letters: B sequences, T positions, M model dim, H heads, V vocabulary size.
"""

from typing import Any, Optional

import torch
from fairseq.data import Dictionary
from fairseq.incremental_decoding_utils import with_incremental_state
from fairseq.models import FairseqIncrementalDecoder
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_alma.moe.switch_layer import SwitchLayer

IncrementalState = dict[str, dict[str, Optional[Tensor]]]


@with_incremental_state
class CachedAttention(nn.Module):
    """Attention that keeps keys and values of earlier positions when fairseq decodes step by step."""

    get_incremental_state: Any  # methods that the decorator adds
    set_incremental_state: Any

    def extend_cache(
        self, key: Tensor, value: Tensor, incremental_state: Optional[IncrementalState]
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values, (B, H, T, M / H) each, of all positions so far; without a state those given."""
        if incremental_state is None:
            return key, value
        cached = self.get_incremental_state(incremental_state, "attn_state")
        if cached is not None:
            key = torch.cat([cached["key"], key], dim=2)
            value = torch.cat([cached["value"], value], dim=2)
        self.set_incremental_state(incremental_state, "attn_state", {"key": key, "value": value})
        return key, value

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> None:
        """Reorder the cache as beam search reorders its hypotheses; fairseq calls this."""
        cached = self.get_incremental_state(incremental_state, "attn_state")
        if cached is not None:
            reordered = {name: tensor.index_select(0, new_order) for name, tensor in cached.items()}
            self.set_incremental_state(incremental_state, "attn_state", reordered)


class FeatureDecoder(FairseqIncrementalDecoder):
    """A decoder that computes features first, then the output layer, which the criterion leaves out.

    A subclass defines ``layers``, ``output_projection`` and ``extract_features``.

    Args:
        dictionary: the vocabulary.
        max_positions: longest sequence, in tokens.
        checkpoint_activations: recompute the layers in the backward pass to save memory.
    """

    layers: nn.ModuleList
    output_projection: nn.Linear
    logit_bias: Optional[Tensor]
    """(V,) added to the logits, large and negative for symbols that never take part; None: nothing."""

    def __init__(self, dictionary: Dictionary, max_positions: int, checkpoint_activations: bool) -> None:
        super().__init__(dictionary)
        self.padding_idx = dictionary.pad()
        self.max_target_positions = max_positions
        self.checkpoint_activations = checkpoint_activations
        self.register_buffer("logit_bias", None, persistent=False)

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Any = None,
        incremental_state: Optional[IncrementalState] = None,
        features_only: bool = False,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Predict the next token at every position.

        Args:
            prev_output_tokens: (B, T) int64, padded on the right.
            encoder_out: unused; fairseq passes it to every decoder.
            incremental_state: cache of earlier positions; then only the newest position is computed (T = 1).
            features_only: return the (B, T, M) input of the output layer rather than its (B, T, V) output.
            unused: further arguments of fairseq's generator (``src_lengths``).

        Returns:
            Logits or features, and a dictionary with ``routing`` (`Routing`) and ``switch`` (`SwitchStatistics`), one
            entry for each Switch layer.
        """
        features, extra = self.extract_features(prev_output_tokens, encoder_out, incremental_state)
        return (features if features_only else self.output_layer(features)), extra

    def apply_layers(self, x: Tensor, *given: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the output of the last layer, (B, T, M), and the dictionary that `forward` returns.

        Args:
            x: (B, T, M), input of the first layer.
            given: further arguments of every layer.
        """
        extra: dict[str, Any] = {"attn": [None], "routing": [], "switch": []}
        for layer in self.layers:
            if self.checkpoint_activations and self.training:
                x, routing, statistics = checkpoint(layer, x, *given, use_reentrant=False)
            else:
                x, routing, statistics = layer(x, *given)
            if routing is not None:
                extra["routing"].append(routing)
                extra["switch"].append(statistics)
        return x, extra

    def output_layer(self, features: Tensor, **unused: Any) -> Tensor:
        """Project (…, M) features to (…, V) logits."""
        return self.output_projection(features)

    def max_positions(self) -> int:
        """Return the longest sequence that the model takes, in tokens."""
        return self.max_target_positions


def mark_for_optimizers(decoder: Any) -> None:
    """Set ``param_group`` of the parameters that optimizers here treat in a way of their own; see `optim.muon`."""
    for module in decoder.modules():
        if isinstance(module, (nn.Embedding, SwitchLayer)):
            table: Any = module.gate if isinstance(module, SwitchLayer) else module
            table.weight.param_group = "adam"
    if decoder.embed_tokens.weight is not decoder.output_projection.weight:
        decoder.embed_tokens.weight.param_group = "embedding"
        decoder.output_projection.weight.param_group = "adam"
