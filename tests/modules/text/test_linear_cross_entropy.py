import pytest
import torch
import torch.nn.functional as F

from fairseq_alma.modules.text import linear_cross_entropy as module
from fairseq_alma.modules.text.linear_cross_entropy import linear_cross_entropy, token_losses


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS_CPU", 3 * 11)  # three tokens, vocabulary size eleven


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
    monkeypatch.setattr(F, "linear", lambda x, w: rows.append(len(x)) or linear(x, w))
    linear_cross_entropy(features, weight, target, ignore_index=1)
    assert rows == [3, 3, 3, 1]


def test_without_gradients_none_are_computed():
    features, weight, target = inputs(torch.float)
    with torch.no_grad():
        loss = linear_cross_entropy(features, weight, target, ignore_index=1)
    assert not loss.requires_grad
