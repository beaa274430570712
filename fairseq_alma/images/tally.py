"""Adds up the predictions of any number of models: the mean of their probabilities or logits, or a vote.

Letters: N models, B images, K classes.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

COMBINATIONS = ("single", "probabilities", "logits", "vote")


class Tally:
    """Predictions of several models for the same images.

    Models are added in their order, so that a sum that is built again after a restart is the same to the last bit.

    Args:
        combine: ``single`` or ``probabilities``: predict the class of the largest mean probability; ``logits``: of the
            largest mean logit; ``vote``: the class that most models find most likely, of several such classes the one
            of the largest mean probability.
    """

    def __init__(self, combine: str) -> None:
        self.combine = combine
        self.num_models = 0
        self.log_sum: Optional[Tensor] = None  # of logits: their sum itself
        self.votes: Optional[Tensor] = None

    def add(self, logits: Tensor) -> None:
        """Add the (N, B, K) logits of N more models."""
        self.num_models += len(logits)
        if self.combine == "logits":
            for each in logits:
                self.log_sum = each if self.log_sum is None else self.log_sum + each
            return
        log_probs = F.log_softmax(logits, dim=-1)
        for each in log_probs:
            self.log_sum = each if self.log_sum is None else torch.logaddexp(self.log_sum, each)
            if self.combine == "vote":
                vote = F.one_hot(each.argmax(dim=-1), logits.size(-1))
                self.votes = vote if self.votes is None else self.votes + vote

    def result(self, labels: Tensor) -> dict[str, float]:
        """Return loss and error.

        Args:
            labels: (B) int64.

        Returns:
            ``loss``, of the mean of probabilities or logits, in nats, and ``error``, 0 to 1.
        """
        assert self.log_sum is not None  # a model was added
        if self.combine == "logits":
            log_probs = F.log_softmax(self.log_sum / self.num_models, dim=-1)
        else:
            log_probs = self.log_sum - torch.log(torch.tensor(float(self.num_models)))
        # The mean of probabilities, at most 1, decides between equal votes and no others.
        scores = log_probs if self.votes is None else self.votes + log_probs.exp() / 2
        wrong = (scores.argmax(dim=-1) != labels).sum().item()
        return {"loss": F.nll_loss(log_probs, labels).item(), "error": wrong / len(labels)}
