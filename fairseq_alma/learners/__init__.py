"""What a learner decides: the schedule of stages, the plan of each. No fairseq.

A new learner is a class under `learner.register_learner`, here or where ``alma-stream --learners-from`` looks.
"""

from fairseq_alma.learners import ensemble, growing_mixture, learner

__all__ = ["ensemble", "growing_mixture", "learner"]
