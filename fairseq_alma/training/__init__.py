"""Training features (one module for each feature), and the integration with fairseq's commands.

This module registers all features except `TimedSaves`, in the order in which their hooks are called. `text.task`
registers `TimedSaves`, because this feature imports fairseq.
"""

from fairseq_alma.training.autocast import Autocast
from fairseq_alma.training.average import WeightAverage
from fairseq_alma.training.best_checkpoint import BestCheckpoint
from fairseq_alma.training.branch import LRBranch
from fairseq_alma.training.carried_optimizer import CarriedOptimizer, TokenCount
from fairseq_alma.training.feature import register_feature
from fairseq_alma.training.new_first import NewFirst

for _kind in (TokenCount, CarriedOptimizer, WeightAverage, LRBranch, BestCheckpoint, NewFirst, Autocast):
    register_feature(_kind)
