"""A feature outside the package, for ``alma-stream --features-from``."""

from dataclasses import dataclass
from typing import Optional

from fairseq_alma.options import opt, real
from fairseq_alma.training.feature import Feature, register_feature


@register_feature
@dataclass
class ClippedWeights(Feature):
    """Clip each weight after an update."""

    clip_weights: Optional[float] = opt(None, "largest absolute value of a weight", range=real(0, above=True))

    def __post_init__(self):
        self.num_updates = 0

    def after_step(self, model, update):
        self.num_updates += 1
        for parameter in model.parameters():
            parameter.data.clamp_(-self.clip_weights, self.clip_weights)

    def state_dict(self):
        return {"clipped_updates": self.num_updates}

    def load_state_dict(self, state):
        self.num_updates = state.get("clipped_updates", 0)
