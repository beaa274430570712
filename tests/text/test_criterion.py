from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.logging import metrics

from fairseq_alma.text.losses import AlmaSwitchCrossEntropy
from tests.text.models import model_of, transformer_of

PAD = 1


def criterion_of(sentence_avg=False):
    return AlmaSwitchCrossEntropy(SimpleNamespace(target_dictionary=Dictionary()), sentence_avg)


def sample_of(num_padded=0):
    tokens = torch.randint(4, 50, (3, 21), generator=torch.Generator().manual_seed(num_padded))
    if num_padded:
        tokens[-1, -num_padded - 1 :] = PAD
    source, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    inputs = {"src_tokens": source, "src_lengths": source.ne(PAD).sum(1)}
    return {"net_input": inputs, "target": target, "ntokens": int(target.ne(PAD).sum())}


def reduced(logs):
    with metrics.aggregate() as aggregator:
        AlmaSwitchCrossEntropy.reduce_metrics(logs)
    return aggregator.get_smoothed_values()


@pytest.mark.parametrize("num_padded", [0, 7])
def test_loss_and_gradient_are_those_of_cross_entropy_plus_the_weighted_balance_loss(num_padded):
    model, sample = model_of().train(), sample_of(num_padded)
    loss, sample_size, log = criterion_of()(model, sample)
    loss.backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    logits, extra = model(**sample["net_input"])
    nll = F.cross_entropy(logits.flatten(0, 1), sample["target"].flatten(), ignore_index=PAD, reduction="sum")
    want = nll + 0.01 * sum(each.balance_loss for each in extra["switch"]) * sample_size
    want.backward()
    assert sample_size == sample["ntokens"] and criterion_of(sentence_avg=True)(model, sample)[1] == 3
    torch.testing.assert_close(log["nll_loss"], nll.detach())
    torch.testing.assert_close(loss, want)
    for a, b in zip(got, (p.grad for p in model.parameters()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_perplexity_is_that_of_the_cross_entropy_and_shares_sum_to_one_also_in_summed_logs():
    model, criterion = model_of().train(), criterion_of()
    logs = [criterion(model, sample_of(num_padded))[2] for num_padded in (0, 5)]
    values = reduced(logs)
    nll = float(sum(log["nll_loss"] for log in logs)) / sum(log["ntokens"] for log in logs)
    assert values["ppl"] == pytest.approx(float(torch.tensor(nll).exp()), rel=1e-3)
    assert values["loss"] > values["nll_loss"]
    for layer in range(2):
        assert sum(values[f"switch{layer}_expert{e:02d}"] for e in range(4)) == pytest.approx(1, abs=1e-3)
        assert 0 <= values[f"switch{layer}_dropped"] < 1
        assert 0 < values[f"switch{layer}_entropy"] <= 1.387  # ln 4
    assert values == pytest.approx(reduced([{key: sum(log[key] for log in logs) for key in logs[0]}]))


def test_a_dense_model_has_no_balance_loss():
    loss, _, log = criterion_of()(model_of(moe_freq=0), sample_of())
    assert loss == log["nll_loss"] and "balance_loss" not in reduced([log])


@pytest.mark.parametrize(
    ("build", "options", "breaks"),
    [
        pytest.param(model_of, {"moe_freq": 0}, 0, marks=pytest.mark.slow),
        (transformer_of, {}, 0),
        pytest.param(model_of, {}, None, marks=pytest.mark.slow),
    ],
    ids=["switch dense", "transformer dense", "experts"],
)
def test_a_compiled_step_has_the_same_loss_and_a_dense_one_is_one_graph(monkeypatch, build, options, breaks):
    found, compile_here = [], torch.compile

    def compile(function, **unused):
        def run(*args):
            found.append(torch._dynamo.explain(function)(*args).graph_break_count)
            return compile_here(function, backend="eager", dynamic=False)(*args)

        return run

    monkeypatch.setattr(torch, "compile", compile)
    models = [build(decoder_layers=2, compile=is_compiled, **options).train() for is_compiled in (False, True)]
    torch.testing.assert_close(*(criterion_of()(model, sample_of())[0] for model in models))
    assert len(found) == 1 and breaks in (None, found[0])
    monkeypatch.setattr(torch, "compile", None)
    criterion_of()(models[1].eval(), sample_of())  # a test is not compiled
