"""A sharded model's gradients over an update of several batches, against those of one process; and what is sent."""

import contextlib
import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from fairseq import models
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_alma.errors import AlmaError
from fairseq_alma.text.sharding import FullySharded, shard_decoder
from tests.cuda_without_gpu.programs import criterion
from tests.forked import together
from tests.text.switch_models import model_of

BATCHES = 3


class Messages(TorchDispatchMode):
    """Counts what processes send each other, by operation and precision."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_allgather_base_", "_reduce_scatter_base_", "allreduce_"):
            sent = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            self.found[name.strip("_").replace("_base", ""), sent.dtype] += 1
        return func(*args, **(kwargs or {}))


def learn(model, rank, number, short):
    tokens = torch.randint(4, 50, (2, 13), generator=torch.Generator().manual_seed(10 * rank + number))
    inputs = {"src_tokens": tokens[:, :-1], "src_lengths": None}
    sample = {"net_input": inputs, "target": tokens[:, 1:], "ntokens": 24, "nsentences": 2}
    with torch.autocast("cpu", torch.bfloat16, enabled=short is not None):
        criterion()(model, sample)[0].backward()


def compare(rank, size, folder, cases):
    """Return for each case how far gradients of an update are from those of one process, by name, and the messages."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    found = [compare_case(rank, size, mesh, *case) for case in cases]
    dist.destroy_process_group()
    return found


def compare_case(rank, size, mesh, short, options):
    whole = model_of(**options)
    sharded = copy.deepcopy(whole)
    shard_decoder(sharded, mesh, short)
    wrapped = models.DistributedFairseqModel(None, sharded, None, torch.device("cpu"))
    assert isinstance(wrapped.module, FullySharded)
    with pytest.raises(AlmaError, match="--no-save-optimizer-state"):
        sharded.state_dict()  # nothing was gathered: a checkpoint without weights, before
    with Messages() as messages:
        for number in range(BATCHES):
            with wrapped.no_sync() if number < BATCHES - 1 else contextlib.nullcontext():
                learn(wrapped, rank, number, short)
    for each in range(size):
        for number in range(BATCHES):
            learn(whole, each, number, short)
    off = {}
    for (name, one), other in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        off[name] = float((size * other.grad.full_tensor() - one.grad).norm() / one.grad.norm().clamp(min=1e-6))
    return off, messages.found


EXACT = [(None, {}), (None, {"checkpoint_activations": True})]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_of_an_update_are_those_of_one_process_and_reduced_once(tmp_path, size):
    for found in together(size, compare, size, tmp_path, [*EXACT, (torch.bfloat16, {})])[0]:
        *exact, (off_in_bf16, messages_in_bf16) = found
        for off, messages in exact:
            assert max(off.values()) < 1e-5
            assert {dtype for _, dtype in messages} == {torch.float32}
            # four layers and the embeddings; they are gathered in each forward and backward pass
            assert messages["reduce_scatter", torch.float32] == 5 and not messages["allreduce", torch.float32]
        assert max(off_in_bf16.values()) < 0.03  # those of one process are rounded too, each product otherwise
        assert messages_in_bf16["allgather", torch.bfloat16] >= 4 * BATCHES
        assert messages_in_bf16["allgather", torch.float32] <= BATCHES  # embeddings, norms and gates
        assert messages_in_bf16["reduce_scatter", torch.float32] == 5
        assert {name for name, dtype in messages_in_bf16 if dtype == torch.bfloat16} == {"allgather"}
