"""The decisions of a learner: the schedule of stages and the plan of each. No fairseq.

A new learner is a class under `learner.register_learner`, here or where ``alma-stream --learners-from`` looks.
"""

from fairseq_alma.learners import ensemble, growing_mixture, learner

__all__ = ["ensemble", "growing_mixture", "learner"]
