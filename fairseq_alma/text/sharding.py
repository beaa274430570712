"""``--expert-parallel`` and ``--fully-shard``: a model over the processes that train it."""

from typing import Any, Optional

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fairseq_alma.moe.expert_parallel import spread_experts
from fairseq_alma.optim.fused_adam import FusedAdam
from fairseq_alma.text.fully_sharded import shard_decoder
from fairseq_alma.training.processes import refuse, world_size


class Sharding:
    """Mixed into a task, in front of fairseq's class."""

    args: Any
    optimizer_class: Optional[str]

    def spread(self, model: nn.Module) -> nn.Module:
        """Return a model that is to be trained, of which each process has a part if the options say so.

        Raises:
            AlmaError: the model, or what the optimizer knows of it, cannot be spread so.
        """
        if world_size() == 1 or self._option is None:
            return model
        if self.optimizer_class != FusedAdam.__name__:
            refuse(
                f"{self._option}: goes with --optimizer fused_adam, whose checkpoints hold the state of all processes"
            )
        if self.args.ema_half_life != "none":
            refuse(f"{self._option}: the average of weights needs all of them in one process; leave out one of the two")
        if self.args.expert_parallel and self.args.fully_shard:
            refuse(
                "--expert-parallel: does not go with --fully-shard, which spreads experts too; leave out one of the two"
            )
        if self.args.fully_shard:
            device = "cpu" if self.args.cpu or not torch.cuda.is_available() else "cuda"
            if getattr(model, "decoder", None) is None or getattr(model.decoder, "compile_layers", False):
                refuse("--fully-shard: goes with language models here without --compile; leave out one of the two")
            shard_decoder(model, init_device_mesh(device, (world_size(),)))
            return model
        try:
            num_layers = spread_experts(model)
        except ValueError as error:
            refuse(f"--expert-parallel: {error}; start a number of processes that divides --num-experts")
        if not num_layers:
            refuse("--expert-parallel: the model has no Switch layer; leave the option out")
        return model

    @property
    def _option(self) -> Any:
        options = {"--expert-parallel": self.args.expert_parallel, "--fully-shard": self.args.fully_shard}
        return next((name for name, is_given in options.items() if is_given), None)
