"""Dropout with the cheaper random numbers of training in bf16 on a CPU; of attention against torch's."""

import pytest
import torch
import torch.nn.functional as F

from fairseq_alma.text import decoder as module
from fairseq_alma.text.decoder import AddKept, DroppedCausalAttention, dropout, keep_bits


def in_bf16():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("probability", [0.02, 0.1, 0.5])
def test_as_many_values_are_dropped_as_asked_for_and_the_expectation_stays(probability):
    torch.manual_seed(0)
    x = torch.ones(1000, 1001, requires_grad=True)
    with in_bf16():
        y = dropout(x, probability, training=True)
    assert (y == 0).double().mean().item() == pytest.approx(probability, abs=2e-3)
    assert y.mean().item() == pytest.approx(1.0, abs=5e-3)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_neighbours_are_dropped_independently():
    torch.manual_seed(0)
    dropped = (keep_bits(torch.Size([4_000_000]), 0.1) == 0).double()
    for distance in range(1, 9):  # four numbers come of one word of the generator
        together = (dropped[:-distance] * dropped[distance:]).mean().item()
        assert together == pytest.approx(0.01, abs=4e-4)


def test_the_seed_decides():
    x = torch.ones(999)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with in_bf16():
            results.append(dropout(x, 0.1, training=True))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_in_fp32_dropout_is_torch_s():
    x = torch.ones(999)
    torch.manual_seed(1)
    want = F.dropout(x, 0.1)
    torch.manual_seed(1)
    assert torch.equal(dropout(x, 0.1, training=True), want)


@pytest.mark.parametrize(("probability", "training"), [(0.0, True), (0.5, False)])
def test_without_training_or_probability_nothing_is_dropped(probability, training):
    x = torch.ones(999)
    with in_bf16():
        assert torch.equal(dropout(x, probability, training), x)


def test_everything_may_be_dropped():
    with in_bf16():
        assert dropout(torch.ones(999), 1.0, training=True).count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_a_branch_with_dropout_is_added_as_dropout_and_addition_would(dtype):
    torch.manual_seed(0)
    residual, kept = torch.randn(3, 5, requires_grad=True), torch.rand(3, 5) < 0.6
    branch = torch.randn(3, 5, dtype=dtype, requires_grad=True)
    got = AddKept.apply(residual, branch, kept, torch.zeros(1), 2.5)
    want = residual + 2.5 * branch.float() * kept
    assert got.dtype == torch.float
    torch.testing.assert_close(got, want)
    grad = torch.randn(3, 5)
    for one, other in zip(*(torch.autograd.grad(out, (residual, branch), grad) for out in (got, want)), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("drops", [True, False])
def test_a_sum_is_kept_exact_beside_the_short_one_that_gradients_go_through(drops):
    torch.manual_seed(0)
    exact, kept = torch.randn(3, 5), torch.rand(3, 5) < 0.6 if drops else None
    residual = exact.bfloat16().requires_grad_()
    branch = torch.randn(3, 5, dtype=torch.bfloat16, requires_grad=True)
    short, total = AddKept.apply(residual, branch, kept, torch.zeros(1), 2.5, exact)
    factors = torch.full((3, 5), 2.5) if kept is None else 2.5 * kept
    torch.testing.assert_close(total, exact + factors * branch.float())
    assert torch.equal(short, total.bfloat16()) and not total.requires_grad
    grad = torch.randn(3, 5).bfloat16()
    of_residual, of_branch = torch.autograd.grad(short, (residual, branch), grad)
    assert torch.equal(of_residual, grad) and torch.equal(of_branch, (grad * factors).bfloat16())


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Of queries, in attention."""
    monkeypatch.setattr(module, "BLOCK", 4)


def inputs(length):
    torch.manual_seed(0)
    return [torch.randn(2, 3, length, 8).bfloat16().requires_grad_() for _ in range(3)]


def output_and_gradients(attend, inputs):
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, torch.linspace(-1, 1, 8, dtype=out.dtype).expand_as(out))]


@pytest.mark.parametrize("length", [1, 4, 11])
def test_without_dropped_weights_it_is_torch_s_attention(monkeypatch, length):
    monkeypatch.setattr(module, "keep_bits", lambda shape, probability: torch.full(shape, -1, dtype=torch.int16))
    monkeypatch.setattr(module, "kept_levels", lambda probability: module.LEVELS)
    queries_keys_values = inputs(length)
    exact = [each.detach().float().requires_grad_() for each in queries_keys_values]
    got = output_and_gradients(lambda *each: DroppedCausalAttention.apply(*each, 0.1), queries_keys_values)
    want = output_and_gradients(lambda *each: F.scaled_dot_product_attention(*each, is_causal=True), exact)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2e-2, atol=2e-2)


def test_the_weights_that_are_dropped_are_those_of_the_bits(monkeypatch):
    length, probability = 4, 0.5  # one block
    query, key, value = inputs(length)
    bits = module.keep_bits(torch.Size([6, length, length]), probability)
    monkeypatch.setattr(module, "keep_bits", lambda shape, probability: bits)

    def plainly(query, key, value):
        scores = query @ key.transpose(-1, -2) * 8**-0.5 + torch.full((length, length), -torch.inf).triu(1)
        return (scores.softmax(-1) * (bits == -1).view(2, 3, length, length) / (1 - probability)) @ value

    exact = [each.detach().float().requires_grad_() for each in (query, key, value)]
    got = output_and_gradients(lambda *each: DroppedCausalAttention.apply(*each, probability), (query, key, value))
    for a, b in zip(got, output_and_gradients(plainly, exact), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2e-2, atol=4e-2)


def test_the_mean_over_many_draws_is_attention_without_dropout():
    with torch.no_grad():
        query, key, value = inputs(9)
        draws = [DroppedCausalAttention.apply(query, key, value, 0.2).float() for _ in range(2000)]
        want = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), is_causal=True)
    assert not torch.equal(draws[0], draws[1])
    torch.testing.assert_close(torch.stack(draws).mean(0), want, rtol=0.03, atol=0.1)
