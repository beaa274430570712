import math

import pytest
import torch
import torch.nn.functional as F
from fairscale.nn.moe.top2gate import top2gating

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.moe import Experts, SwitchLayer, dispatch_to_experts
from tests.moe.test_dispatch import routing_of


def switch_layer(num_experts=4, model_dim=8, ffn_dim=16, seed=0, **options):
    torch.manual_seed(seed)
    return SwitchLayer(model_dim, ffn_dim, GateTree.flat(num_experts), **options)


def reference(layer, x, padding=None):
    """One token after the other, as Fedus et al. 2021 describe the layer."""
    num_tokens = len(x) if padding is None else int((~padding).sum())
    factor = layer.capacity_factor if layer.training else layer.eval_capacity_factor
    num_experts = layer.experts.num_experts
    places = [math.ceil(factor * num_tokens / num_experts) if factor > 0 else len(x)] * num_experts
    out = []
    for s, token in enumerate(x):
        probs = torch.softmax(layer.gate.weight.float() @ token.float(), dim=0)
        expert = int(probs.argmax())
        if (padding is not None and padding[s]) or places[expert] == 0:
            out.append(torch.zeros_like(token))
            continue
        places[expert] -= 1
        experts = layer.experts
        hidden = F.relu(experts.fc1_weight[expert] @ token + experts.fc1_bias[expert])
        out.append(probs[expert] * (experts.fc2_weight[expert] @ hidden + experts.fc2_bias[expert]))
    return torch.stack(out)


@pytest.mark.parametrize("num_experts", [1, 3, 4])
@pytest.mark.parametrize("capacity_factor", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("with_padding", [False, True])
def test_switch_layer_equals_a_plain_loop_over_tokens_with_gradients(num_experts, capacity_factor, with_padding):
    layer = switch_layer(num_experts, capacity_factor=capacity_factor).double().train()
    torch.nn.init.normal_(layer.experts.fc1_bias)
    torch.nn.init.normal_(layer.experts.fc2_bias)
    x = torch.randn(23, 8, dtype=torch.double)
    padding = torch.rand(23) < 0.3 if with_padding else None
    upstream = torch.randn_like(x)

    def run(function):
        inputs = x.clone().requires_grad_()
        layer.zero_grad()
        out = function(inputs)
        (out * upstream).sum().backward()
        return out, inputs.grad, *(p.grad for p in layer.parameters())

    got = run(lambda inputs: layer(inputs, padding)[0])
    want = run(lambda inputs: reference(layer, inputs, padding))
    for a, b in zip(got, want, strict=True):
        # the gate works in fp32 on both sides
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-5, atol=1e-6)


def test_padding_changes_neither_capacity_nor_balance_loss():
    layer = switch_layer().train()
    x = torch.randn(20, 8)
    padded = torch.cat([torch.randn(12, 8), x])
    padding = torch.arange(32) < 12
    out, _, statistics = layer(x)
    out_padded, _, statistics_padded = layer(padded, padding)
    torch.testing.assert_close(out_padded[12:], out)
    assert not out_padded[:12].any()
    torch.testing.assert_close(statistics_padded.balance_loss, statistics.balance_loss)
    torch.testing.assert_close(statistics_padded.entropy, statistics.entropy)
    assert statistics_padded.num_dropped == statistics.num_dropped > 0
    assert statistics_padded.routed == statistics.routed


def test_no_token_is_dropped_at_test_and_outputs_do_not_depend_on_other_tokens():
    layer = switch_layer().eval()
    x = torch.randn(30, 8)
    out, _, statistics = layer(x)
    assert statistics.num_dropped == 0
    for s in range(30):
        torch.testing.assert_close(layer(x[s : s + 1])[0][0], out[s])


def test_first_choices_overflow_and_balance_loss_equal_those_of_fairscale():
    layer = switch_layer(capacity_factor=2.0).train()
    x = torch.randn(40, 8) + 2 * layer.gate.weight[0].detach()  # most tokens go to expert 0, whose capacity is 20
    _, routing, statistics = layer(x)
    balance_loss, _, mask = top2gating(F.linear(x, layer.gate.weight))
    theirs = mask[torch.arange(40), routing.expert].any(dim=1)  # (S,): whether the first choice has a place
    assert sorted(dispatch_to_experts(routing, 2.0).tokens.tolist()) == theirs.nonzero().flatten().tolist()
    assert statistics.num_dropped == 40 - int(theirs.sum()) > 0
    # The loss of fairscale is a mean over experts; Fedus et al. 2021 sum over experts.
    torch.testing.assert_close(statistics.balance_loss, 4**2 * balance_loss)


def test_an_expert_without_tokens_has_zero_gradients():
    experts = Experts(3, 8, 16)
    routing = routing_of(0, 2, 0)
    experts(torch.randn(3, 8), dispatch_to_experts(routing, 0.0), routing.combine_weights).sum().backward()
    assert not experts.fc1_weight.grad[1].any()
    assert experts.fc1_weight.grad[2].any()


def test_gated_experts_are_swiglu_without_biases_and_zero_at_first():
    torch.manual_seed(0)
    experts, routing = Experts(3, 8, 16, gated=True), routing_of(0, 2, 1, 0)
    assert {name for name, _ in experts.named_parameters()} == {"gate_proj", "up_proj", "down_proj"}
    x, dispatch = torch.randn(4, 8), dispatch_to_experts(routing, 0.0)
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
            out = experts(x, dispatch_to_experts(routing, 0.0), routing.combine_weights)
        out.square().sum().backward()
        found.append([out, *(each.grad for each in experts.parameters())])
    for short, exact in zip(*found, strict=True):
        assert short.dtype == torch.float32
        assert (short - exact).norm() < 0.03 * exact.norm()
