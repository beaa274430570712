"""Learners: strategies that plan the training runs and tests of each stage. This package does not import fairseq.

To add a learner, register a class with `learner.register_learner`, in this package or in a file for
``alma-stream --learners-from``.
"""

from fairseq_alma.learners import ensemble, growing_mixture, learner

__all__ = ["ensemble", "growing_mixture", "learner"]
