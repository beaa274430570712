"""Adam in one pass over memory.

fairseq's own Adam goes through all weights eleven times, one parameter after the other, unless apex is installed: a
tenth of an update of a mixture, most of whose weights have few tokens to compute on.
"""

from typing import Any

import torch
from fairseq.optim import register_optimizer
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig


@register_optimizer("fused_adam", dataclass=FairseqAdamConfig)
class FusedAdam(FairseqAdam):
    """torch's fused AdamW under the options of ``--optimizer adam``, on a CPU or a GPU.

    The same update but for ``--adam-eps``, which torch adds to the corrected root of the second moment and fairseq to
    the uncorrected one: from zero moments on, the first updates differ where gradients are that small.
    """

    def __init__(self, cfg: Any, params: Any) -> None:
        super().__init__(cfg, params)
        self._optimizer = torch.optim.AdamW(params, fused=True, **self.optimizer_config)

    @property
    def supports_flat_params(self) -> bool:
        """Whether one flat vector may stand for all parameters."""
        return True
