"""The experts of a layer over two processes, against all of them in one."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.moe import expert_parallel
from fairseq_alma.moe.expert_parallel import spread_experts
from fairseq_alma.moe.switch_layer import SwitchLayer
from tests.forked import together


def learn(layer, rank, padded):
    """One layer, then another on what it gives; the processes' batches differ in size."""
    x = torch.randn(20 + 7 * rank, 8, generator=torch.Generator().manual_seed(rank))
    padding = torch.arange(len(x)) < 5 if padded else None
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


def compare(rank, folder, by_places, padded):
    expert_parallel.is_waiting_dear = lambda x: by_places  # as on a GPU
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    whole = TwoLayers()
    spread = copy.deepcopy(whole)
    assert spread_experts(spread) == 2
    outs = [learn(whole, each, padded) for each in range(2)]  # gradients add up
    for _ in range(2):  # the second batch agrees anew
        spread.zero_grad()
        torch.testing.assert_close(learn(spread, rank, padded), outs[rank])
    for (name, one), other in zip(whole.named_parameters(), spread.parameters(), strict=True):
        got = other.grad
        if "experts" not in name:
            dist.all_reduce(got)
        torch.testing.assert_close(got, one.grad.chunk(2)[rank] if "experts" in name else one.grad, msg=name)
    dist.destroy_process_group()
    return True


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("by_places", [False, True], ids=["by their sizes", "by places"])
def test_experts_of_two_processes_compute_and_learn_what_those_of_one_do(tmp_path, by_places, padded):
    assert together(2, compare, tmp_path, by_places, padded)[0] == [True, True]
