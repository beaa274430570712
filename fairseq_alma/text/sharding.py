"""``--expert-parallel`` and ``--fully-shard``: a model over the processes that train it."""

import contextlib
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Optional

import torch
from fairseq import models
from fairseq.distributed import ModuleProxyWrapper
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from fairseq_alma.moe.expert_parallel import spread_experts
from fairseq_alma.optim.fused_adam import FusedAdam
from fairseq_alma.options import TRAINING, opt
from fairseq_alma.text.decoder import DecoderLayer, SwitchDecoder
from fairseq_alma.training.feature import Feature, Setting
from fairseq_alma.training.loading import replaced
from fairseq_alma.training.processes import refuse, world_size
from fairseq_alma.training.spread_parameters import keep_checkpoints_whole


@dataclass
class Sharding(Feature):
    """Gives each of several processes a part of the model; checkpoints hold the whole."""

    expert_parallel: bool = opt(
        False,
        "with several processes: each has 1/processes of every layer's experts, for the tokens of all; the losses are "
        "those of one process up to rounding. Checkpoints hold the whole model. Needs --optimizer fused_adam",
        side=TRAINING,
        kinds=("text",),
    )
    fully_shard: bool = opt(
        False,
        "with several processes: each has 1/processes of all weights, gradients and moments (torch's fully_shard), and "
        "gradients of all weights until the last batch of an update; otherwise as --expert-parallel",
        side=TRAINING,
        kinds=("text",),
    )

    def wrap(self, model: nn.Module, setting: Setting) -> nn.Module:
        """Spread a model that is to be trained.

        Raises:
            AlmaError: the model, or what the optimizer knows of it, cannot be spread so.
        """
        if world_size() == 1:
            return model
        flag = "--expert-parallel" if self.expert_parallel else "--fully-shard"
        if setting.optimizer != FusedAdam.__name__:
            refuse(f"{flag}: goes with --optimizer fused_adam, whose checkpoints hold the state of all processes")
        if setting.needs_whole_weights is not None:
            refuse(f"{flag}: {setting.needs_whole_weights} needs all of them in one process; leave out one of the two")
        if getattr(model, "is_compiled", False):
            refuse(f"{flag}: goes with language models here without --compile; leave out one of the two")
        if self.expert_parallel and self.fully_shard:
            refuse(
                "--expert-parallel: does not go with --fully-shard, which spreads experts too; leave out one of the two"
            )
        if self.fully_shard:
            if getattr(model, "decoder", None) is None:
                refuse("--fully-shard: goes with the language models here; leave it out")
            short = None if setting.autocast is None else getattr(torch, setting.autocast)
            shard_decoder(model, init_device_mesh(setting.device, (world_size(),)), short)
            return model
        try:
            num_layers = spread_experts(model)
        except ValueError as error:
            refuse(f"--expert-parallel: {error}; start a number of processes that divides --num-experts")
        if not num_layers:
            refuse("--expert-parallel: the model has no Switch layer; leave the option out")
        return model


def shard_decoder(model: nn.Module, mesh: DeviceMesh, short: Optional[torch.dtype] = None) -> None:
    """Shard a language model, a layer at a time (torch's ``fully_shard``, FSDP2).

    A layer's matrices are gathered when it is computed, in the forward and in the backward pass; embeddings, norms and
    gates from the forward to the end of the backward pass. Gradients are averaged over the processes, in fp32.

    Args:
        model: the same in every process.
        mesh: of the processes, one dimension.
        short: the precision that autocast computes a layer's products in, in which their weights are gathered then;
            what is computed, or looked up, in fp32 is not. None: that of the weights.
    """
    policy = MixedPrecisionPolicy(short, reduce_dtype=short and torch.float32, cast_forward_inputs=False)
    for module in list(model.modules()):
        if isinstance(module, DecoderLayer):
            fully_shard(module.products(), mesh=mesh, mp_policy=policy)
        elif isinstance(module, SwitchDecoder):
            module.is_sharded = True
    fully_shard(model, mesh=mesh)
    keep_checkpoints_whole(model)


class FullySharded(nn.Module):
    """Stands where fairseq expects a wrapper for data parallel training: `shard_decoder` has done what one would do.

    Args:
        module: the model.
    """

    def __init__(self, module: FSDPModule) -> None:
        super().__init__()
        self.module: Any = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients of batches in this process; those of the last batch of an update reduce them all."""
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)


def _wrapped(wrap: Callable, args: Any, model: nn.Module, process_group: Any, device: torch.device) -> nn.Module:
    """Stand in for ``DistributedFairseqModel``, whose wrappers copy gradients to buffers that nothing here needs."""
    if not isinstance(model, FSDPModule):
        return wrap(args, model, process_group, device)
    return ModuleProxyWrapper(FullySharded(model.to(device)))


models.DistributedFairseqModel = replaced(models.DistributedFairseqModel, _wrapped)
