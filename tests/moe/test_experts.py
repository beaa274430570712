import pytest
import torch
import torch.nn.functional as F

from fairseq_alma.moe.dispatch import dispatch_tokens
from fairseq_alma.moe.experts import Experts
from fairseq_alma.moe.gate import Routing


def routing_of(*experts, num_experts=3):
    num_tokens = len(experts)
    return Routing(
        torch.tensor(experts), torch.full((num_tokens, num_experts), 1 / num_experts), torch.ones(num_tokens)
    )


def test_an_expert_without_tokens_has_zero_gradients():
    experts = Experts(3, 8, 16)
    routing = routing_of(0, 2, 0)
    experts(torch.randn(3, 8), dispatch_tokens(routing, 0.0), routing.combine_weights).sum().backward()
    assert not experts.fc1_weight.grad[1].any()
    assert experts.fc1_weight.grad[2].any()


def test_gated_experts_are_swiglu_without_biases_and_begin_as_zero():
    torch.manual_seed(0)
    experts, routing = Experts(3, 8, 16, gated=True), routing_of(0, 2, 1, 0)
    assert {name for name, _ in experts.named_parameters()} == {"gate_proj", "up_proj", "down_proj"}
    x, dispatch = torch.randn(4, 8), dispatch_tokens(routing, 0.0)
    assert not experts(x, dispatch, routing.combine_weights).any()
    torch.nn.init.normal_(experts.down_proj)
    out = experts(x, dispatch, routing.combine_weights)
    for token, expert in enumerate(routing.expert):
        hidden = F.silu(experts.gate_proj[expert] @ x[token]) * (experts.up_proj[expert] @ x[token])
        torch.testing.assert_close(out[token], experts.down_proj[expert] @ hidden)


@pytest.mark.parametrize("gated", [False, True])
def test_under_autocast_weights_and_their_gradients_stay_in_fp32(gated):
    torch.manual_seed(0)
    experts = Experts(3, 8, 16, gated, activation=torch.tanh)  # rounding moves a ReLU over its edge
    torch.nn.init.normal_(experts.down_proj if gated else experts.fc2_weight)
    x, routing = torch.randn(20, 8), routing_of(*[0, 1, 2, 2] * 5)
    found = []
    for enabled in (True, False):
        experts.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = experts(x, dispatch_tokens(routing, 0.0), routing.combine_weights)
        out.square().sum().backward()
        found.append([out, *(each.grad for each in experts.parameters())])
    for short, exact in zip(*found, strict=True):
        assert short.dtype == torch.float32
        assert (short - exact).norm() < 0.03 * exact.norm()
