"""Weights, gradients and optimizer state over the processes that train together (torch's ``fully_shard``, FSDP2)."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fairseq_alma.text.decoder_layer import DecoderLayer
from fairseq_alma.training.spread_parameters import keep_checkpoints_whole


def shard_decoder(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a language model, a layer at a time; checkpoints hold the whole.

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
