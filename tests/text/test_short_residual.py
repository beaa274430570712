"""Language models as a GPU computes them under autocast in bf16, on a CPU."""

import pytest
import torch

from fairseq_alma.moe import short_copies, switch_layer
from fairseq_alma.text import decoder, linear_cross_entropy
from tests.cuda_without_gpu.programs import criterion
from tests.text.switch_models import model_of


@pytest.fixture
def ways(monkeypatch):
    """How a batch is computed: the last by what serves a GPU."""
    way = []

    def short_dtype(x):
        return torch.bfloat16 if way == ["a GPU's"] else None

    for module in (short_copies, switch_layer, decoder):
        monkeypatch.setattr(module, "short_dtype", short_dtype)
    monkeypatch.setattr(short_copies, "product", lambda a, b, dtype: (a.float() @ b.float()).to(dtype))
    cross_entropies = linear_cross_entropy.LinearCrossEntropy, linear_cross_entropy.InShortLogits
    monkeypatch.setattr(linear_cross_entropy, "_best", lambda *given: cross_entropies[way != ["fp32"]])
    monkeypatch.setattr(decoder.SwitchDecoder, "_shares_gradients", lambda *given: way == ["a GPU's"])

    def each():
        for way[:] in (["fp32"], ["autocast"], ["a GPU's"]):
            with torch.autocast("cpu", torch.bfloat16, enabled=way != ["fp32"]):
                yield

    return each()


@pytest.mark.parametrize("options", [{}, {"checkpoint_activations": True}, {"moe_freq": 0}])
def test_gradients_of_a_short_residual_are_about_as_near_to_those_of_fp32_as_autocast_s(ways, options):
    model = model_of(decoder_embed_dim=64, decoder_ffn_embed_dim=128, **options).train()
    tokens = torch.randint(4, 50, (8, 25), generator=torch.Generator().manual_seed(0))
    sample = {"net_input": {"src_tokens": tokens[:, :-1]}, "target": tokens[:, 1:], "ntokens": 8 * 24}
    losses, gradients = [], []
    for _ in ways:
        model.zero_grad()
        loss, *_ = criterion()(model, sample)
        loss.backward()
        losses.append(loss.item())
        assert all(each.grad.dtype == torch.float for each in model.parameters())
        gradients.append(torch.cat([each.grad.flatten() for each in model.parameters()]))
    exact, autocast, short = gradients
    assert losses[1:] == pytest.approx(2 * losses[:1], rel=5e-3)
    assert 0 < (short - exact).norm() < 2 * (autocast - exact).norm() < 0.2 * exact.norm()
    assert not torch.equal(short, autocast)
