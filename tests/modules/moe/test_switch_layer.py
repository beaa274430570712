import math

import pytest
import torch
import torch.nn.functional as F

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.modules.moe.dispatch import dispatch, expert_capacity
from fairseq_alma.modules.moe.experts import Experts
from fairseq_alma.modules.moe.gate import Gate, Routing
from fairseq_alma.modules.moe.switch_layer import SwitchLayer


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


@pytest.mark.parametrize("path", ["_looped", "_padded"])
@pytest.mark.parametrize("capacity_factor", [0.0, 1.0])
def test_every_way_to_compute_the_experts_gives_the_same(path, capacity_factor):
    layer = switch_layer(5).double()
    torch.nn.init.normal_(layer.experts.fc1_bias)
    torch.nn.init.normal_(layer.experts.fc2_bias)
    x = torch.randn(40, 8, dtype=torch.double)
    padding = torch.arange(40) > 35
    places = dispatch(layer.gate(x), capacity_factor, padding)
    taken = torch.zeros(40, dtype=torch.bool).index_fill(0, places.order[: places.counts.sum()], True)

    def run(compute):
        inputs = x.clone().requires_grad_()
        layer.zero_grad()
        out = compute(inputs, places) * taken.unsqueeze(1)
        out.square().sum().backward()
        return out, inputs.grad, *(p.grad for p in layer.experts.parameters())

    for a, b in zip(run(getattr(layer.experts, path)), run(layer.experts._looped), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])  # fp32: as under autocast
def test_grouped_products_equal_the_loop_over_experts(weights):
    if not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    layer = switch_layer(4, model_dim=16, ffn_dim=32).to(weights)
    x = torch.randn(64, 16).bfloat16()
    places = dispatch(layer.gate(x), 1.0)
    taken = torch.zeros(64, dtype=torch.bool).index_fill(0, places.order[: places.counts.sum()], True).unsqueeze(1)

    def run(compute):
        inputs = x.clone().requires_grad_()
        layer.zero_grad()
        out = compute(inputs, places) * taken
        out.float().square().sum().backward()
        return out, inputs.grad, *(p.grad for p in layer.experts.parameters())

    try:
        got = run(layer.experts._grouped)
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"this torch has no grouped_mm on a CPU: {error}")
    with torch.autocast("cpu", torch.bfloat16, enabled=weights == torch.float32):
        want = run(layer.experts._looped)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_switch_layer_drops_overflow_in_token_order():
    routing = Routing(torch.tensor([0, 0, 1, 0, 0, 1]), torch.ones(6), torch.full((6, 2), 0.5))
    places = dispatch(routing, capacity_factor=1.0)  # capacity 3: expert 0 takes tokens 0, 1 and 3, not 4
    assert places.order.tolist() == [0, 1, 3, 2, 5, 4]
    assert places.counts.tolist() == [3, 2]
    assert places.routed.tolist() == [4, 2]


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
        routing = Routing(expert, torch.ones(num_tokens), torch.full((num_tokens, num_experts), 1 / num_experts))
        factor = float(torch.rand((), generator=generator)) * 2 + 0.01
        places = dispatch(routing, factor, padding)
        num_real = int((~padding).sum())
        assert places.counts.max() <= expert_capacity(num_real, num_experts, factor)
        assert sorted(places.order.tolist()) == list(range(num_tokens))
        assert not padding[places.order[: places.counts.sum()]].any()


def test_padding_takes_no_capacity_and_no_part_in_the_balance_loss():
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


def test_balance_loss_is_that_of_fedus_et_al():
    layer = switch_layer(3)
    x = torch.randn(50, 8)
    _, routing, statistics = layer(x)
    shares = torch.bincount(routing.expert, minlength=3) / 50
    torch.testing.assert_close(statistics.balance_loss, 3 * (shares * routing.probs.mean(0)).sum())


def test_at_test_no_token_is_dropped_and_neighbours_do_not_matter():
    layer = switch_layer().eval()
    x = torch.randn(30, 8)
    out, _, statistics = layer(x)
    assert statistics.num_dropped == 0
    for s in range(30):
        torch.testing.assert_close(layer(x[s : s + 1])[0][0], out[s])


def test_the_gate_works_in_fp32_whatever_the_model_s_precision():
    gate = Gate(8, GateTree.flat(4)).bfloat16()
    routing = gate(torch.randn(10, 8).bfloat16())
    assert routing.probs.dtype == routing.weight.dtype == torch.float32
    x = torch.randn(10, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        probs = gate(x).probs
    torch.testing.assert_close(probs, torch.softmax(x @ gate.weight.float().t(), -1), rtol=1e-6, atol=1e-7)


def test_the_gate_keeps_a_gradient_through_the_chosen_probability():
    layer = switch_layer(4)
    layer(torch.randn(10, 8))[0].square().sum().backward()
    assert layer.gate.weight.grad.abs().sum() > 0


def test_one_expert_makes_a_dense_layer():
    layer = switch_layer(1).train()
    x = torch.randn(10, 8)
    experts = layer.experts
    hidden = F.relu(F.linear(x, experts.fc1_weight[0], experts.fc1_bias[0]))
    torch.testing.assert_close(layer(x)[0], F.linear(hidden, experts.fc2_weight[0], experts.fc2_bias[0]))


def test_an_expert_without_tokens_has_zero_gradients():
    experts = Experts(3, 8, 16)
    routing = Routing(torch.tensor([0, 2, 0]), torch.ones(3), torch.full((3, 3), 1 / 3))
    experts(torch.randn(3, 8), dispatch(routing, 0.0)).sum().backward()
    assert not experts.fc1_weight.grad[1].any()
    assert experts.fc1_weight.grad[2].any()


def tree_gate(nested, model_dim=8, seed=0):
    torch.manual_seed(seed)
    return Gate(model_dim, GateTree.from_nested(nested))


def test_a_tree_s_probabilities_are_products_along_the_path():
    gate = tree_gate([0, [1, 2], 3])
    x = torch.randn(6, 8)
    logits = x @ gate.weight.t()
    root = torch.softmax(logits[:, :3], -1)
    inner = torch.softmax(logits[:, 3:], -1)
    want = torch.stack([root[:, 0], root[:, 1] * inner[:, 0], root[:, 1] * inner[:, 1], root[:, 2]], dim=1)
    torch.testing.assert_close(gate(x).probs, want)


def test_a_tree_descends_to_the_best_child_and_weighs_by_the_root_alone():
    gate = tree_gate([0, [1, [2, 4]], 3])
    x = torch.randn(200, 8)
    routing = gate(x)
    logits = x @ gate.weight.t()
    root = torch.softmax(logits[:, :3], -1)
    for s in range(200):
        expert = [0, None, 3][int(root[s].argmax())]
        if expert is None:
            expert = [1, None][int(logits[s, 3:5].argmax())]
        if expert is None:
            expert = [2, 4][int(logits[s, 5:7].argmax())]
        assert routing.expert[s] == expert
    torch.testing.assert_close(routing.weight, root.max(-1).values)
    assert set(routing.expert.tolist()) == {0, 1, 2, 3, 4}


def test_every_choice_of_a_tree_has_a_gradient():
    gate = tree_gate([0, [1, [2, 4]], 3])
    (gate(torch.randn(200, 8)).weight * torch.randn(200)).sum().backward()
    assert (gate.weight.grad.abs().sum(1) > 0).all()
