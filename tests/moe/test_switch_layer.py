import math

import pytest
import torch
import torch.nn.functional as F

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.moe.experts import Experts, Weighted
from fairseq_alma.moe.switch_layer import SwitchLayer, SwitchTotals


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
@pytest.mark.parametrize("by_places", [False, True])
def test_switch_layer_equals_a_plain_loop_over_tokens_with_gradients(
    num_experts, capacity_factor, with_padding, by_places, monkeypatch
):
    monkeypatch.setattr(Experts, "is_by_places", lambda self, x, factor: by_places and factor > 0)  # as on a GPU
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
    with_padding, without = SwitchTotals.of([statistics_padded]), SwitchTotals.of([statistics])
    torch.testing.assert_close(with_padding.entropies, without.entropies)
    assert with_padding.num_dropped == without.num_dropped > 0


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
    assert SwitchTotals.of([statistics]).num_dropped == 0
    for s in range(30):
        torch.testing.assert_close(layer(x[s : s + 1])[0][0], out[s])


@pytest.mark.parametrize("is_taken", [None, torch.tensor([True, False, True])])
def test_weighted_rows_and_their_gradients_are_those_of_a_product(is_taken):
    torch.manual_seed(0)
    x, weights = torch.randn(3, 5, requires_grad=True), torch.rand(3, requires_grad=True)
    taken = torch.ones(3) if is_taken is None else is_taken.float()
    want = x * (weights * taken).unsqueeze(-1)
    got = Weighted.apply(x, weights, is_taken)
    torch.testing.assert_close(got, want)
    grad = torch.randn(3, 5)
    for one, other in zip(*(torch.autograd.grad(out, (x, weights), grad) for out in (got, want)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("capacity_factor", [0.0, 0.8])
def test_a_gpu_adds_up_for_all_layers_what_a_cpu_does(capacity_factor):
    found = []
    for add_up in (SwitchTotals.of, SwitchTotals._in_few_operations):
        layers = [switch_layer(capacity_factor=capacity_factor, seed=seed) for seed in range(2)]
        x, padding = torch.randn(30, 8), torch.arange(30) > 26
        totals = add_up([layer(x, padding)[2] for layer in layers])
        totals.balance_losses.sum().backward()
        found.append((*totals, *(layer.gate.weight.grad for layer in layers)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, check_dtype=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_experts_by_places_on_a_gpu_compute_and_learn_what_a_cpu_does(dtype):
    found = []
    for device in ("cpu", "cuda"):
        layer = switch_layer(4, model_dim=16, ffn_dim=32, activation=torch.tanh).to(device)
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).to(device)
        assert layer.experts.is_by_places(x, 1.0) == (device == "cuda")
        with torch.autocast(device, dtype, enabled=dtype is not None):
            out = layer(x)[0]
        out.float().square().sum().backward()
        found.append([out.float().cpu(), *(each.grad.cpu() for each in layer.parameters())])
    for here, there in zip(*found, strict=True):
        assert (here - there).norm() < (1e-4 if dtype is None else 0.03) * here.norm()
