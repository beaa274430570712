"""Learners: the schedule of stages and the plan of each stage. No fairseq.

A new learner is a class under `learner.register_learner`, here or in a file for ``alma-stream --learners-from``.
"""

from fairseq_alma.learners import ensemble, growing_mixture, learner

__all__ = ["ensemble", "growing_mixture", "learner"]
