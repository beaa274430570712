import pytest
import torch
import torch.nn.functional as F

import fairseq_alma.text.losses
from fairseq_alma.text.losses import linear_cross_entropy, token_losses


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    """Chunks of three tokens; yields the number of tokens of each product."""
    monkeypatch.setattr(fairseq_alma.text.losses, "CHUNK_ELEMENTS", 3 * 11)  # vocabulary size eleven
    rows, linear = [], F.linear
    monkeypatch.setattr(F, "linear", lambda x, *more: rows.append(len(x)) or linear(x, *more))
    return rows


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    features, weight = torch.randn(10, 6, requires_grad=True), torch.randn(11, 6, requires_grad=True)
    target = torch.randint(11, (10,))
    target[[2, 9]] = 1  # ignored
    return features, weight, target


def test_chunked_cross_entropy_and_its_gradients_equal_those_of_torch(inputs, chunks):
    features, weight, target = inputs
    loss = linear_cross_entropy(features, weight, target, ignore_index=1)
    assert chunks == [3, 3, 3, 1]
    (3 * loss).backward()
    got = loss.detach(), features.grad.clone(), weight.grad.clone()
    features.grad = weight.grad = None
    want = F.cross_entropy(features @ weight.T, target, ignore_index=1, reduction="sum")
    (3 * want).backward()
    for a, b in zip(got, (want.detach(), features.grad, weight.grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_losses_without_a_gradient_equal_those_of_torch(inputs):
    features, weight, target = inputs
    each = F.cross_entropy(features @ weight.T, target, reduction="none")
    torch.testing.assert_close(token_losses(features, weight, target), each.detach())
    with torch.no_grad():
        loss = linear_cross_entropy(features, weight, target, ignore_index=1)
    torch.testing.assert_close(loss, each[target != 1].sum().detach())


def test_under_autocast_the_loss_is_fp32_and_gradients_are_those_of_bf16_logits(inputs):
    features, weight, target = inputs
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


def test_a_bias_removes_tokens_from_the_softmax(inputs):
    features, weight, target = inputs
    bias = torch.zeros(11)
    bias[7:] = -1e9
    target = target % 7
    want = F.cross_entropy((features @ weight.T)[:, :7], target, ignore_index=1, reduction="sum")
    loss = linear_cross_entropy(features, weight, target, 1, bias)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(token_losses(features, weight, target, bias)[target != 1].sum(), want.detach())
    (grad,) = torch.autograd.grad(loss, weight)
    assert not grad[7:].any()
