"""What a training can do beside learning, one file a feature, and processes that share the work.

The features are registered here, in the order of their hooks.
"""

from fairseq_alma.training import autocast, average, branch, carried_optimizer, replay

__all__ = ["autocast", "average", "branch", "carried_optimizer", "replay"]
