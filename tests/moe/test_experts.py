import pytest
import torch
import torch.nn.functional as F

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.moe.dispatch import Dispatch, dispatch_tokens
from fairseq_alma.moe.experts import Experts
from fairseq_alma.moe.gate import Routing
from fairseq_alma.moe.switch_layer import SwitchLayer

needs_grouped_products = pytest.mark.skipif(
    not hasattr(F, "grouped_mm"), reason="this torch has no grouped_mm; where it has, a CPU has it too"
)


def layer_of(num_experts, model_dim=8, ffn_dim=16):
    torch.manual_seed(0)
    return SwitchLayer(model_dim, ffn_dim, GateTree.flat(num_experts))


def run(layer, compute, x, dispatch):
    """Return the output of the rows that some expert takes, and all gradients."""
    taken = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    taken = taken.index_fill(0, dispatch.taken(), True)
    inputs = x.clone().requires_grad_()
    layer.zero_grad()
    out = compute(inputs, dispatch) * taken.unsqueeze(1)
    out.float().square().sum().backward()
    return out, inputs.grad, *(p.grad.clone() for p in layer.experts.parameters())


@pytest.mark.parametrize("capacity_factor", [0.0, 1.0])
def test_padded_products_equal_the_loop_over_experts(capacity_factor):
    layer = layer_of(5).double()
    torch.nn.init.normal_(layer.experts.fc1_bias)
    torch.nn.init.normal_(layer.experts.fc2_bias)
    x = torch.randn(40, 8, dtype=torch.double)
    dispatch = dispatch_tokens(layer.gate(x), capacity_factor, torch.arange(40) > 35)
    padded, looped = (run(layer, way, x, dispatch) for way in (layer.experts._padded, layer.experts._looped))
    for a, b in zip(padded, looped, strict=True):
        torch.testing.assert_close(a, b)


@needs_grouped_products
def test_grouped_products_equal_the_loop_over_experts():
    layer = layer_of(4, model_dim=16, ffn_dim=32).bfloat16()
    x = torch.randn(64, 16).bfloat16()
    dispatch = dispatch_tokens(layer.gate(x), 1.0)
    grouped, looped = (run(layer, way, x, dispatch) for way in (layer.experts._grouped, layer.experts._looped))
    for a, b in zip(grouped, looped, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@needs_grouped_products
@torch.no_grad()
def test_grouped_products_are_exact_where_bf16_is():
    layer = layer_of(4, model_dim=16, ffn_dim=32)
    for parameter in layer.experts.parameters():
        parameter.copy_(torch.randint(-1, 2, parameter.shape))
    layer.experts.fc2_weight.mul_(torch.rand(layer.experts.fc2_weight.shape) < 0.2)
    layer.bfloat16()
    x = torch.randint(-2, 3, (64, 16)).bfloat16()
    dispatch = dispatch_tokens(layer.gate(x), 0.0)
    grouped = layer.experts._grouped(x, dispatch)
    assert 10 < grouped.abs().max() <= 256  # whole numbers up to there are exact in bf16
    assert torch.equal(grouped, layer.experts._looped(x, dispatch))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "way"), [(torch.bfloat16, "_grouped"), (torch.float32, "_padded")])
def test_on_a_gpu_each_precision_takes_its_way_and_equals_the_loop_on_a_cpu(dtype, way, monkeypatch):
    layer = layer_of(4, model_dim=16, ffn_dim=32).to(dtype)
    x = torch.randn(64, 16).to(dtype)
    dispatch = dispatch_tokens(layer.gate(x), 1.0)
    looped = run(layer, layer.experts, x, dispatch)
    layer.cuda()
    taken = []
    here = getattr(layer.experts, way)
    monkeypatch.setattr(layer.experts, way, lambda *args: taken.append(way) or here(*args))
    on_gpu = Dispatch(*(each.cuda() if isinstance(each, torch.Tensor) else each for each in dispatch))
    for a, b in zip(run(layer, layer.experts, x.cuda(), on_gpu), looped, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=2e-2, atol=2e-2)
    assert taken == [way]


def test_an_expert_without_tokens_has_zero_gradients():
    experts = Experts(3, 8, 16)
    routing = Routing(torch.tensor([0, 2, 0]), torch.full((3, 3), 1 / 3), torch.ones(3))
    experts(torch.randn(3, 8), dispatch_tokens(routing, 0.0)).sum().backward()
    assert not experts.fc1_weight.grad[1].any()
    assert experts.fc1_weight.grad[2].any()


def test_rows_in_bf16_leave_the_weights_and_their_gradients_in_fp32():
    layer = layer_of(3)
    layer.experts.activation = torch.tanh  # rounding moves a ReLU over its edge
    x = torch.randn(20, 8)
    dispatch = dispatch_tokens(layer.gate(x), capacity_factor=0)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(layer, layer.experts, x, dispatch)
    assert {each.dtype for each in got} == {torch.float32}
    for a, b in zip(got, run(layer, layer.experts._looped, x, dispatch), strict=True):
        assert (a - b).norm() < 0.02 * b.norm()
