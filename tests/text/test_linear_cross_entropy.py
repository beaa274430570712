import pytest
import torch
import torch.nn.functional as F

from fairseq_alma.text import linear_cross_entropy as module
from fairseq_alma.text.linear_cross_entropy import linear_cross_entropy, token_losses


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 3 * 11)  # three tokens, vocabulary size eleven


def inputs(dtype=torch.double):
    torch.manual_seed(0)
    features = torch.randn(10, 6, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 6, dtype=dtype, requires_grad=True)
    target = torch.randint(11, (10,))
    target[[2, 9]] = 1  # ignored
    return features, weight, target


def test_chunked_cross_entropy_and_its_gradients_equal_torch_s():
    features, weight, target = inputs(torch.float)
    loss = linear_cross_entropy(features, weight, target, ignore_index=1)
    (3 * loss).backward()
    got = loss.detach(), features.grad.clone(), weight.grad.clone()
    features.grad = weight.grad = None
    want = F.cross_entropy(F.linear(features, weight), target, ignore_index=1, reduction="sum")
    (3 * want).backward()
    for a, b in zip(got, (want.detach(), features.grad, weight.grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_token_losses_equal_torch_s():
    features, weight, target = inputs(torch.float)
    want = F.cross_entropy(F.linear(features, weight), target, reduction="none")
    torch.testing.assert_close(token_losses(features, weight, target), want.detach())


def test_no_larger_fp32_copy_than_one_chunk_is_made(monkeypatch):
    features, weight, target = inputs(torch.float)
    rows = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *more: rows.append(len(x)) or linear(x, *more))
    linear_cross_entropy(features, weight, target, ignore_index=1)
    assert rows == [3, 3, 3, 1]


def test_without_gradients_the_loss_is_the_same():
    features, weight, target = inputs(torch.float)
    with torch.no_grad():
        loss = linear_cross_entropy(features, weight, target, ignore_index=1)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, linear_cross_entropy(features, weight, target, ignore_index=1).detach())


def test_under_autocast_the_loss_is_fp32_and_gradients_are_those_of_bf16_logits():
    features, weight, target = inputs(torch.float)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(features, weight, target, ignore_index=1)
    (2 * loss).backward()
    assert loss.dtype == features.grad.dtype == weight.grad.dtype == torch.float
    logits = F.linear(features.bfloat16(), weight.bfloat16()).detach().float().requires_grad_()
    want = F.cross_entropy(logits, target, ignore_index=1, reduction="sum")
    torch.testing.assert_close(loss.detach(), want.detach())
    (grad_logits,) = torch.autograd.grad(want, logits)
    short = 2 * grad_logits.bfloat16().float()
    torch.testing.assert_close(features.grad, short @ weight.bfloat16().float(), rtol=8e-3, atol=2e-2)
    torch.testing.assert_close(weight.grad, short.t() @ features.bfloat16().float(), rtol=8e-3, atol=2e-2)


def test_a_bias_takes_tokens_out_of_the_softmax():
    features, weight, target = inputs(torch.float)
    bias = torch.zeros(11)
    bias[7:] = -1e9
    target = target % 7
    want = F.cross_entropy(F.linear(features, weight)[:, :7], target, ignore_index=1, reduction="sum")
    loss = linear_cross_entropy(features, weight, target, 1, bias)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(token_losses(features, weight, target, bias)[target != 1].sum(), want.detach())
    (grad,) = torch.autograd.grad(loss, weight)
    assert not grad[7:].any()
