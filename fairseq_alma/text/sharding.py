"""``--expert-parallel`` and ``--fully-shard``: a model over the processes that train it."""

from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from fairseq_alma.moe.expert_parallel import spread_experts
from fairseq_alma.optim.fused_adam import FusedAdam
from fairseq_alma.options import TRAINING, opt
from fairseq_alma.text.decoder_layer import DecoderLayer
from fairseq_alma.training.feature import Feature, Setting
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
        "with several processes: each has 1/processes of all weights, gradients and moments (torch's fully_shard); "
        "otherwise as --expert-parallel",
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
            shard_decoder(model, init_device_mesh(setting.device, (world_size(),)))
            return model
        try:
            num_layers = spread_experts(model)
        except ValueError as error:
            refuse(f"--expert-parallel: {error}; start a number of processes that divides --num-experts")
        if not num_layers:
            refuse("--expert-parallel: the model has no Switch layer; leave the option out")
        return model


def shard_decoder(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a language model, a layer at a time (torch's ``fully_shard``, FSDP2).

    A layer's weights are gathered when it is computed, in the forward and in the backward pass; embeddings from the
    forward to the end of the backward pass. Gradients are averaged over the processes.

    Args:
        model: the same in every process.
        mesh: of the processes, one dimension.
    """
    for module in list(model.modules()):
        if isinstance(module, DecoderLayer):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    keep_checkpoints_whole(model)
