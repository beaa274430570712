"""Training features, and the integration with fairseq's commands. Importing the package registers the features."""

from fairseq_alma.training import features

__all__ = ["features"]
