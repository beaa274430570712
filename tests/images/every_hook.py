"""A feature from outside the package that uses each hook of a training which ours do not use on images."""

from dataclasses import dataclass
from typing import Optional

import numpy as np

from fairseq_alma.options import opt, real
from fairseq_alma.training.feature import Feature, register_feature


@register_feature
@dataclass
class EveryHook(Feature):
    """Draws earlier images, and counts all."""

    earlier: Optional[float] = opt(None, "share of the images before that each stage has too", range=real(0, 1))

    def __post_init__(self):
        self.counted = 0

    def count(self, logs):
        self.counted += sum(log["ntokens"] for log in logs)

    def draw_earlier(self, sizes, seed):
        before = sum(map(sum, sizes[:-1]))
        drawn = np.random.default_rng(seed).permutation(before)[: round(self.earlier * before)]
        return drawn if before else None

    def state_dict(self):
        return {"counted": self.counted}

    def load_state_dict(self, state):
        self.counted = state["counted"]
