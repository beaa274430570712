"""Causal attention with dropout, block by block, against torch's."""

import pytest
import torch
import torch.nn.functional as F

from fairseq_alma.text import dropped_attention as module
from fairseq_alma.text.dropped_attention import DroppedCausalAttention


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
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
