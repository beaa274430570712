"""What ensembles of language models and of image models have in common: members that were trained one by one.

Letters: N members.
"""

from typing import Any, Iterable, Mapping, Optional, Sequence

import torch
from torch import Tensor, nn

from fairseq_alma.checkpoints.ensemble_file import weights_of_member


class TrainedMembers:
    """Put before a fairseq model among the base classes, so that it loads members from an ensemble's checkpoint.

    Attributes:
        embedded: numbers of the members whose weights are in the ensemble's own checkpoint.
    """

    embedded: frozenset[int]

    def trained_members(self) -> Sequence[nn.Module]:
        """Return the members, in their order."""
        raise NotImplementedError

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True, model_cfg: Any = None, args: Any = None
    ) -> None:
        """Load the embedded members; the others have their weights since they were built.

        Args:
            state_dict: the checkpoint's ``model``.
            strict: every weight of an embedded member must be there, and none beside.
            model_cfg: unused; each member has a configuration of its own.
            args: unused, as before.
        """
        for index, member in enumerate(self.trained_members()):
            weights = weights_of_member(state_dict, index)
            if weights or index in self.embedded:
                member.load_state_dict(weights, strict)


def log_of_mean(log_probs: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the log of the weighted mean of probabilities.

    Args:
        log_probs: N tensors of one shape, (…, V), in any precision; changed in place, and asked for one by one, so that
            no more than two of them need memory at a time.
        weights: N numbers of at least 0, in all 1. Python floats, as --fp16 would round a tensor of the model.

    Returns:
        (…, V) fp32; they serve as logits, as their softmax is the mean itself.
    """
    log_weights = torch.tensor(weights, dtype=torch.float64).log().tolist()
    total: Optional[Tensor] = None
    for each, log_weight in zip(log_probs, log_weights, strict=True):
        each = each.float().add_(log_weight)
        total = each if total is None else torch.logaddexp(total, each, out=total)
        del each  # else it lives while the next member computes
    assert total is not None
    return total
