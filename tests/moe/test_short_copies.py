"""Linear maps as autocast on a GPU has them, computed on a CPU."""

import torch

from fairseq_alma.moe import short_copies
from fairseq_alma.moe.short_copies import ShortLinear, WithShort, batch_of_update, short_copy


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


def test_a_tensor_and_its_short_copy_add_up_their_gradients_in_the_tensor_s_precision():
    x = torch.randn(5, requires_grad=True)
    same, short = WithShort.apply(x, torch.bfloat16)
    assert torch.equal(same, x) and torch.equal(short, x.bfloat16())
    (3 * same + 2**-10 * short.float()).sum().backward()
    assert torch.equal(x.grad, torch.full((5,), 3 + 2**-10))  # which bf16 has no room for
