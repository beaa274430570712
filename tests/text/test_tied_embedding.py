"""Embeddings as a GPU has them, computed on a CPU, against autograd's."""

import pytest
import torch
import torch.nn.functional as F

from fairseq_alma.text.decoder import SwitchDecoder, TiedEmbedding
from tests.text.switch_models import model_of


@pytest.mark.parametrize("is_shared", [True, False])
def test_embeddings_and_their_gradients_are_autograd_s(is_shared):
    torch.manual_seed(0)
    weight, positions = torch.randn(11, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True)
    tokens, upstream = torch.randint(11, (3, 4)), torch.randn(3, 4, 11)
    tokens[1] = 5  # often

    def gradients(x, output):
        assert x.shape == (3, 4, 6)
        loss = (x.tanh() @ output.t() * upstream).sum()
        return x.detach(), *torch.autograd.grad(loss, (weight, positions))

    x, same = TiedEmbedding.apply(tokens, weight, positions, 2, 3.0)
    got = gradients(x, same if is_shared else weight)
    want = gradients(3 * F.embedding(tokens, weight) + positions[2:6], weight)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_model_computes_the_same_either_way(monkeypatch):
    model, tokens = model_of().eval(), torch.randint(4, 50, (2, 9))
    outs = []
    for shares in (False, True):
        monkeypatch.setattr(SwitchDecoder, "_shares_gradients", lambda self, tokens, shares=shares: shares)
        features, extra = model(tokens, features_only=True, is_padded=False)
        factors, weight = model.output_factors(features, extra)
        model.zero_grad()
        F.cross_entropy((factors @ weight.t()).flatten(0, 1), tokens.flatten()).backward()
        assert ("embeddings" in extra) == shares
        outs.append([features.detach(), *(each.grad for each in model.parameters())])
    for one, other in zip(*outs, strict=True):
        torch.testing.assert_close(one, other)
