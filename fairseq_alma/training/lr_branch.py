"""A branch: the learning rate of the last updates goes down to zero, whatever schedule it follows before.

Source: warmup-stable-decay (Hu et al. 2024, MiniCPM); the shape 1 - sqrt is that of Hägele et al. 2024.
"""

from typing import Any

from torch import nn


def branch_factor(update: int, first: int, end: int, shape: str) -> float:
    """Return what the learning rate of an update is multiplied by.

    Args:
        update: its number, from 0.
        first: the first update of the branch; it and those before have the factor 1.
        end: the update at which the learning rate would be 0; the one before is the last.
        shape: ``sqrt`` or ``linear``.
    """
    progress = min(1.0, max(0.0, (update - first) / (end - first)))
    return 1.0 - (progress**0.5 if shape == "sqrt" else progress)


class LRBranch:
    """Mixed into a task, in front of fairseq's class.

    The schedule sets the learning rate anew after each update (``fixed`` and ``inverse_sqrt`` do), so that a factor on
    it lasts for one.
    """

    args: Any

    def optimizer_step(self, optimizer: Any, model: nn.Module, update_num: int) -> None:
        """Make an update; fairseq calls this."""
        first, end = self.args.branch_from, self.args.branch_until
        if first is not None and end is not None:
            optimizer.set_lr(optimizer.get_lr() * branch_factor(update_num, first, end, self.args.branch_shape))
        super().optimizer_step(optimizer, model=model, update_num=update_num)  # type: ignore[misc]
