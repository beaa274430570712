"""What a training can do beside learning, one file a feature, and processes that share the work.

The features of both kinds of data are registered here, in the order of their options and hooks; ``text/sharding.py``
has one more.
"""

from fairseq_alma.training.autocast import Autocast
from fairseq_alma.training.average import WeightAverage
from fairseq_alma.training.branch import LRBranch
from fairseq_alma.training.carried_optimizer import CarriedOptimizer, Rewarm, TokenCount
from fairseq_alma.training.feature import register_feature
from fairseq_alma.training.replay import Replay
from fairseq_alma.training.stage_ends import BestCheckpoint, StageEnds

for _kind in (
    TokenCount,
    CarriedOptimizer,
    WeightAverage,
    LRBranch,
    BestCheckpoint,
    Replay,
    Rewarm,
    StageEnds,
    Autocast,
):
    register_feature(_kind)
