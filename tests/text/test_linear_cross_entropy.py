import pytest
import torch
import torch.nn.functional as F

from fairseq_alma.text import linear_cross_entropy as module
from fairseq_alma.text.linear_cross_entropy import linear_cross_entropy, token_losses


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS_CPU", 3 * 11)  # three tokens, vocabulary size eleven
    monkeypatch.setattr(module, "CHUNK_ELEMENTS_BF16", 6 * 11)
    monkeypatch.setattr(module, "CACHED_ELEMENTS", 2 * 11)


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


@pytest.fixture(params=["on a CPU", "on a GPU", "on a GPU, in one chunk"])
def in_bf16(request, monkeypatch):
    """Both ways, computed on a CPU; that of a GPU has its own chunks."""
    if request.param != "on a CPU":
        if "one" in request.param:
            monkeypatch.setattr(module, "CHUNK_ELEMENTS_CPU", 2**20)
        monkeypatch.setattr(module, "_best", lambda features, weight: module.InShortLogits)


@pytest.mark.parametrize("by", ["autocast", "weights"])
def test_in_bf16_the_gradients_are_those_of_bf16_logits_and_an_fp32_softmax(by, in_bf16):
    dtype = torch.float if by == "autocast" else torch.bfloat16
    features, weight, target = inputs(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=by == "autocast"):
        loss = linear_cross_entropy(features, weight, target, ignore_index=1)
    (2 * loss).backward()
    assert loss.dtype == torch.float
    assert features.grad.dtype == weight.grad.dtype == dtype
    logits = F.linear(features.bfloat16(), weight.bfloat16()).detach().float().requires_grad_()
    want = F.cross_entropy(logits, target, ignore_index=1, reduction="sum")
    torch.testing.assert_close(loss.detach(), want.detach(), rtol=1e-3, atol=1e-5)
    (grad_logits,) = torch.autograd.grad(want, logits)
    short = 2 * grad_logits.bfloat16().float()
    torch.testing.assert_close(features.grad.float(), short @ weight.bfloat16().float(), rtol=8e-3, atol=2e-2)
    torch.testing.assert_close(weight.grad.float(), short.t() @ features.bfloat16().float(), rtol=8e-3, atol=2e-2)


def test_a_loss_in_bf16_is_finite_for_tokens_whose_probability_is_zero_in_fp32(in_bf16, request):
    features, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [200.0]])
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(features, weight, torch.tensor([0]), ignore_index=1)
    on_a_cpu = request.node.callspec.params["in_bf16"] == "on a CPU"
    assert loss.item() == 200.0 if on_a_cpu else 87 < loss.item() < 88  # the smallest number of fp32


@pytest.mark.parametrize("bf16", [False, True])
def test_where_nothing_is_ignored_all_tokens_count(bf16, in_bf16):
    found = []
    for ignored in (-1, 1):
        features, weight, target = inputs(torch.float)
        target[target == 1] = 2
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = linear_cross_entropy(features, weight, target, ignored)
        loss.backward()
        found.append((loss.detach(), features.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
