"""Linear maps as autocast on a GPU has them, computed on a CPU."""

import torch

from fairseq_alma.moe import short_copies
from fairseq_alma.moe.short_copies import (
    ShortGate,
    ShortLinear,
    ShortNorm,
    ShortVectors,
    batch_of_update,
    short_copy,
)


def test_a_map_of_short_rows_is_that_of_autocast_and_its_weights_get_gradients_of_their_own_precision():
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(12, 5), torch.randn(3, 7, 12).bfloat16().requires_grad_()
    copies = [short_copy(each, torch.bfloat16) for each in (linear.weight, linear.bias)]
    ShortLinear.apply(x, linear.weight, linear.bias, *copies).float().square().sum().backward()
    got = [x.grad, linear.weight.grad, linear.bias.grad]
    exact = x.detach().float().requires_grad_()  # a gradient is as precise as what it is of
    out = ShortLinear.apply(exact, linear.weight, linear.bias, *copies)
    (grad,) = torch.autograd.grad(out.float().square().sum(), exact)
    assert grad.dtype == torch.float
    torch.testing.assert_close(grad, x.grad.float(), rtol=2e-2, atol=2e-2)
    x.grad = linear.weight.grad = linear.bias.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        linear(x).float().square().sum().backward()
    for a, b in zip(got, (x.grad, linear.weight.grad, linear.bias.grad), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_the_batches_of_one_update_share_a_copy_and_no_other_weights_do():
    (weight,) = weights = [torch.nn.Parameter(torch.ones(3))]

    def copy():
        return short_copy(weights[0], torch.bfloat16)

    with batch_of_update(0):
        first = copy()
        assert copy() is first
    weight.data.fill_(2)  # as fairseq's optimizers do, which no counter of torch's notices
    with batch_of_update(1):
        assert copy().tolist() == [2, 2, 2]
        with torch.no_grad():
            weight.fill_(3)  # as loading does
        assert copy().tolist() == [3, 3, 3]
    weight.data.fill_(4)
    assert copy().tolist() == [4, 4, 4]  # outside of a training's batches
    del weight, weights[0]
    assert not len(short_copies._KEPT)


def test_a_norm_of_a_short_residual_is_that_of_fp32_and_adds_to_the_residual_s_gradient():
    torch.manual_seed(0)
    norm, x = torch.nn.LayerNorm(12), torch.randn(3, 7, 12).bfloat16().requires_grad_()
    torch.nn.init.normal_(norm.weight, 1)
    torch.nn.init.normal_(norm.bias)
    same, out = ShortNorm.apply(x, *ShortVectors.apply(torch.bfloat16, 3.0, norm.weight, norm.bias), norm.eps)
    exact, upstream = x.detach().float().requires_grad_(), torch.randn(3, 7, 12)
    want = 3 * norm(exact)
    for residual, wanted in ((same, exact), (None, None)):  # the last norm's has no other use
        got = (out * upstream).sum() if residual is None else (out * upstream + residual.square()).sum()
        gradients = torch.autograd.grad(got, (x, norm.weight, norm.bias), retain_graph=True)
        wanted = (want * upstream).sum() + (0 if wanted is None else wanted.square().sum())
        others = torch.autograd.grad(wanted, (exact, norm.weight, norm.bias), retain_graph=True)
        assert [each.dtype for each in gradients] == [torch.bfloat16, torch.float, torch.float]
        for one, other in zip((out, *gradients), (want, *others), strict=True):
            assert (one.float() - other).norm() < 0.01 * other.norm()


def test_copies_of_several_weights_are_made_once_an_update():
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    with batch_of_update(0):
        first = ShortVectors.apply(torch.bfloat16, 1.0, *weights)
        assert ShortVectors.apply(torch.bfloat16, 1.0, *weights)[1].data_ptr() == first[1].data_ptr()
        with torch.no_grad():
            weights[1].fill_(3)  # as loading does
        assert ShortVectors.apply(torch.bfloat16, 2.0, *weights)[1].tolist() == [6, 6, 6]


def test_a_gate_s_logits_for_short_rows_have_the_digits_of_fp32(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(short_copies, "product", lambda a, b, dtype: a.to(dtype) @ b.to(dtype))  # as a GPU's
    x, weight = torch.randn(50, 12).bfloat16().requires_grad_(), torch.randn(5, 12, requires_grad=True)
    same, logits = ShortGate.apply(x, weight)
    exact = x.detach().double().requires_grad_()
    want = exact @ weight.double().t()
    torch.testing.assert_close(logits.double(), want, rtol=1e-6, atol=1e-6)
    upstream = torch.randn(50, 5)
    got = torch.autograd.grad((same * 2).float().sum() + (logits * upstream).sum(), (x, weight))
    wanted = torch.autograd.grad((exact * 2).sum() + (want * upstream).sum(), (exact, weight))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=2e-2, atol=0.1)
