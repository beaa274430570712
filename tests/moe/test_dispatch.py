import pytest
import torch

from fairseq_alma.moe.dispatch import dispatch_tokens, expert_capacity
from fairseq_alma.moe.gate import Routing


def test_overflow_is_dropped_in_token_order():
    routing = Routing(torch.tensor([0, 0, 1, 0, 0, 1]), torch.full((6, 2), 0.5), torch.ones(6))
    dispatch = dispatch_tokens(routing, capacity_factor=1.0)  # capacity 3: expert 0 takes tokens 0, 1 and 3, not 4
    assert dispatch.order.tolist() == [0, 1, 3, 2, 5, 4]
    assert dispatch.counts.tolist() == [3, 2]
    assert dispatch.routed.tolist() == [4, 2]


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "factor", "capacity"),
    [(10, 4, 1.0, 3), (12, 4, 1.25, 4), (10, 1, 1.1, 11), (1, 8, 1.0, 1)],
)
def test_capacity_is_an_even_share_rounded_up(num_tokens, num_experts, factor, capacity):
    assert expert_capacity(num_tokens, num_experts, factor) == capacity


def test_no_expert_ever_takes_more_than_its_capacity():
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        num_tokens, num_experts = (int(torch.randint(1, limit, (), generator=generator)) for limit in (60, 9))
        expert = torch.randint(num_experts, (num_tokens,), generator=generator)
        padding = torch.rand(num_tokens, generator=generator) < 0.4
        routing = Routing(expert, torch.full((num_tokens, num_experts), 1 / num_experts), torch.ones(num_tokens))
        factor = float(torch.rand((), generator=generator)) * 2 + 0.01
        dispatch = dispatch_tokens(routing, factor, padding)
        num_real = int((~padding).sum())
        assert dispatch.counts.max() <= expert_capacity(num_real, num_experts, factor)
        assert sorted(dispatch.order.tolist()) == list(range(num_tokens))
        assert not padding[dispatch.order[: dispatch.counts.sum()]].any()
