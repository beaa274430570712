"""The experts of a layer over several processes, against all of them in one."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.moe import expert_parallel
from fairseq_alma.moe.expert_parallel import spread_experts
from fairseq_alma.moe.switch_layer import SwitchLayer
from tests.forked import together


def learn(layer, rank, padded, short):
    """One layer, then another on what it gives; the processes' batches differ in size."""
    x = torch.randn(20 + 7 * rank, 8, generator=torch.Generator().manual_seed(rank))
    padding = torch.arange(len(x)) < 5 if padded else None
    with torch.autocast("cpu", torch.bfloat16, enabled=short):
        out = layer(x, padding)
    out.square().sum().backward()
    return out.detach()


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(SwitchLayer(8, 16, GateTree.flat(4), capacity_factor=0.8) for _ in range(2))

    def forward(self, x, padding):
        for layer in self.layers:
            x = x + layer(x, padding)[0]
        return x


def compare(rank, size, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size)
    for case in itertools.product([False, True], repeat=3):
        compare_case(rank, size, *case)
    dist.destroy_process_group()
    return True


def compare_case(rank, size, by_places, padded, short):
    expert_parallel.is_waiting_dear = lambda x: by_places  # as on a GPU
    whole = TwoLayers()
    spread = copy.deepcopy(whole)
    assert spread_experts(spread) == 2
    outs = [learn(whole, each, padded, short) for each in range(size)]  # gradients add up

    def assert_near(one, other, name=""):
        assert one.dtype == other.dtype
        assert (one - other).norm() <= (0.02 if short else 1e-5) * other.norm(), (name, by_places, padded, short)

    for _ in range(2):  # the second batch agrees anew
        spread.zero_grad()
        assert_near(learn(spread, rank, padded, short), outs[rank])
    for (name, one), other in zip(whole.named_parameters(), spread.parameters(), strict=True):
        got = other.grad
        if "experts" not in name:
            dist.all_reduce(got)
        assert_near(got, one.grad.chunk(size)[rank] if "experts" in name else one.grad, name)


@pytest.mark.parametrize("size", [2, 4])
def test_experts_of_several_processes_compute_and_learn_what_those_of_one_do(tmp_path, size):
    assert together(size, compare, size, tmp_path)[0] == [True] * size
