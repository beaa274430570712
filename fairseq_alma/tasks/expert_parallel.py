"""``--expert-parallel``: the experts of each layer over the processes that train together."""

from typing import Any

from torch import nn

from fairseq_alma.modules.moe.expert_parallel import spread_experts
from fairseq_alma.optim.fused_adam import FusedAdam
from fairseq_alma.tasks.processes import refuse, world_size


class ExpertParallel:
    """Mixed into a task, in front of fairseq's class."""

    args: Any

    def spread(self, model: nn.Module) -> nn.Module:
        """Return a model that is to be trained; where the option is given, each process keeps its share of the experts.

        Raises:
            AlmaError: there are no experts, or the processes cannot share them evenly.
        """
        if self.args.expert_parallel and world_size() > 1:
            try:
                num_layers = spread_experts(model)
            except ValueError as error:
                refuse(f"--expert-parallel: {error}; start a number of processes that divides --num-experts")
            if not num_layers:
                refuse("--expert-parallel: the model has no Switch layer; leave the option out")
        return model

    def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
        """Update the weights; fairseq calls this.

        Raises:
            AlmaError: the optimizer cannot save what several processes have.
        """
        if self.args.expert_parallel and world_size() > 1 and not isinstance(optimizer, FusedAdam):
            refuse("--expert-parallel: goes with --optimizer fused_adam, whose checkpoints hold all experts")
        super().optimizer_step(optimizer, model=model, update_num=update_num)  # type: ignore[misc]
