import math

import pytest
import torch

from fairseq_alma.moe import Routing, dispatch_to_experts, sum_by_expert


def routing_of(*experts, num_experts=3):
    probs = torch.full((len(experts), num_experts), 1 / num_experts)
    return Routing(torch.tensor(experts), probs, torch.ones(len(experts)))


def test_overflow_is_dropped_in_token_order():
    dispatch = dispatch_to_experts(routing_of(0, 0, 1, 0, 0, 1, num_experts=2), capacity_factor=1.0)
    # The capacity is 3: expert 0 takes tokens 0, 1 and 3, not 4.
    assert dispatch.tokens.tolist() == [0, 1, 3, 2, 5]
    assert (dispatch.counts, dispatch.routed) == ([3, 2], [4, 2])


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "factor", "capacity"),
    [(10, 4, 1.0, 3), (12, 4, 1.25, 4), (20, 2, 1.1, 11), (1, 8, 1.0, 1)],
)
def test_capacity_is_an_even_share_rounded_up(num_tokens, num_experts, factor, capacity):
    assert dispatch_to_experts(routing_of(*[0] * num_tokens, num_experts=num_experts), factor).counts[0] == capacity


def test_no_expert_ever_takes_more_than_its_capacity():
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        num_tokens, num_experts = (int(torch.randint(1, limit, (), generator=generator)) for limit in (60, 9))
        expert = torch.randint(num_experts, (num_tokens,), generator=generator)
        padding = torch.rand(num_tokens, generator=generator) < 0.4
        factor = float(torch.rand((), generator=generator)) * 2 + 0.01
        dispatch = dispatch_to_experts(routing_of(*expert.tolist(), num_experts=num_experts), factor, padding)
        num_real = int((~padding).sum())
        assert max(dispatch.counts) <= max(1, math.ceil(factor * num_real / num_experts))
        assert sum(dispatch.routed) == num_real
        assert not padding[dispatch.tokens].any()
        assert len(dispatch.tokens.unique()) == len(dispatch.tokens) == sum(dispatch.counts)


NUM_EXPERTS = (3, 4)  # of two layers


def batch(num_tokens, seed):
    """Return losses and the routing of each layer."""
    generator = torch.Generator().manual_seed(seed)
    losses = torch.rand(num_tokens, generator=generator, dtype=torch.double)
    routings = []
    for num_experts in NUM_EXPERTS:
        probs = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.double).softmax(dim=1)
        routings.append(Routing(probs.argmax(dim=1), probs, probs.amax(dim=1)))
    return losses, routings


def test_the_losses_of_an_expert_are_those_of_its_tokens_without_padding():
    losses, routings = batch(20, 1)
    is_real = torch.arange(20) < 17
    losses = losses * is_real
    for routing, num_experts in zip(routings, NUM_EXPERTS, strict=True):
        wanted = torch.zeros(2, num_experts, dtype=torch.double)
        for token in range(17):
            wanted[0][routing.expert[token]] += losses[token]
            wanted[1][routing.expert[token]] += 1
        torch.testing.assert_close(sum_by_expert(losses, routing, is_real), wanted)
