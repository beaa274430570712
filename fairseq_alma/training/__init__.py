"""Training features, one file each, and the integration of training and tests with fairseq's commands.

The features for both kinds of data are registered here, in the order of their hooks.
"""

from fairseq_alma.training.autocast import Autocast
from fairseq_alma.training.average import WeightAverage
from fairseq_alma.training.best_checkpoint import BestCheckpoint
from fairseq_alma.training.branch import LRBranch
from fairseq_alma.training.carried_optimizer import CarriedOptimizer, TokenCount
from fairseq_alma.training.feature import register_feature
from fairseq_alma.training.replay import Replay

for _kind in (TokenCount, CarriedOptimizer, WeightAverage, LRBranch, BestCheckpoint, Replay, Autocast):
    register_feature(_kind)
