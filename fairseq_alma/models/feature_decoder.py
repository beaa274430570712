"""What decoders here have in common: features first, then the output layer, which the criterion leaves out.

Letters: B sequences, T positions, M model dim, V units of the vocabulary.
"""

from typing import Any, Optional

from fairseq.models import FairseqIncrementalDecoder
from torch import Tensor

from fairseq_alma.modules.text.causal_self_attention import IncrementalState


class FeatureDecoder(FairseqIncrementalDecoder):
    """A decoder whose ``extract_features`` and ``output_layer`` a subclass defines."""

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
            Logits or features, and a dictionary with ``routing`` and ``switch`` (`SwitchStatistics`), one entry for
            each Switch layer.
        """
        features, extra = self.extract_features(prev_output_tokens, encoder_out, incremental_state)
        return (features if features_only else self.output_layer(features)), extra
