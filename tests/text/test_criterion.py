from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.logging import metrics

from fairseq_alma.text.criterion import AlmaSwitchCrossEntropy
from tests.text.models import model_of

PAD = 1


def criterion_of(sentence_avg=False):
    return AlmaSwitchCrossEntropy(SimpleNamespace(target_dictionary=Dictionary()), sentence_avg)


def sample_of(num_sentences=3, length=20, num_padded=0):
    generator = torch.Generator().manual_seed(num_padded)
    tokens = torch.randint(4, 50, (num_sentences, length + 1), generator=generator)
    if num_padded:
        tokens[-1, -num_padded - 1 :] = PAD
    source, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return {
        "net_input": {"src_tokens": source, "src_lengths": source.ne(PAD).sum(1)},
        "target": target,
        "ntokens": int(target.ne(PAD).sum()),
    }


@pytest.mark.parametrize("num_padded", [0, 7])
def test_the_loss_is_cross_entropy_plus_the_weighted_balance_loss(num_padded):
    model, sample = model_of().train(), sample_of(num_padded=num_padded)
    loss, sample_size, log = criterion_of()(model, sample)
    logits, extra = model(**sample["net_input"])
    want = F.cross_entropy(logits.flatten(0, 1), sample["target"].flatten(), ignore_index=PAD, reduction="sum")
    balance = sum(statistics.balance_loss for statistics in extra["switch"])
    assert sample_size == sample["ntokens"]
    torch.testing.assert_close(log["nll_loss"], want.detach())
    torch.testing.assert_close(loss, want + 0.01 * balance * sample_size)


def test_its_gradient_is_that_of_the_plain_computation():
    model, sample = model_of().train(), sample_of(num_padded=3)
    criterion_of()(model, sample)[0].backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    logits, extra = model(**sample["net_input"])
    nll = F.cross_entropy(logits.flatten(0, 1), sample["target"].flatten(), ignore_index=PAD, reduction="sum")
    (nll + 0.01 * sum(s.balance_loss for s in extra["switch"]) * sample["ntokens"]).backward()
    for a, b in zip(got, (p.grad for p in model.parameters()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_perplexity_comes_from_cross_entropy_alone_and_shares_add_up():
    model, criterion = model_of().train(), criterion_of()
    logs = [criterion(model, sample_of(num_padded=n))[2] for n in (0, 5)]
    with metrics.aggregate() as aggregator:
        AlmaSwitchCrossEntropy.reduce_metrics(logs)
    values = aggregator.get_smoothed_values()
    ntokens = sum(log["ntokens"] for log in logs)
    nll = float(sum(log["nll_loss"] for log in logs)) / ntokens
    assert values["ppl"] == pytest.approx(float(torch.tensor(nll).exp()), rel=1e-3)
    assert values["loss"] > values["nll_loss"]
    for layer in range(2):
        assert sum(values[f"switch{layer}_expert{e:02d}"] for e in range(4)) == pytest.approx(1, abs=1e-3)
        assert 0 <= values[f"switch{layer}_dropped"] < 1
        assert 0 < values[f"switch{layer}_entropy"] <= 1.387  # ln 4


def test_logs_of_workers_may_be_summed_before_they_are_reduced():
    model, criterion = model_of().eval(), criterion_of()
    logs = [criterion(model, sample_of(num_padded=n))[2] for n in (0, 5)]
    summed = [{key: sum(log[key] for log in logs) for key in logs[0]}]
    results = []
    for outputs in (logs, summed):
        with metrics.aggregate() as aggregator:
            AlmaSwitchCrossEntropy.reduce_metrics(outputs)
        results.append(aggregator.get_smoothed_values())
    assert results[0] == pytest.approx(results[1])


def test_sentences_may_be_the_sample_size():
    _, sample_size, _ = criterion_of(sentence_avg=True)(model_of(), sample_of())
    assert sample_size == 3


def test_a_dense_model_has_no_balance_loss():
    model, sample = model_of(moe_freq=0), sample_of()
    loss, _, log = criterion_of()(model, sample)
    assert loss == log["nll_loss"]
    with metrics.aggregate() as aggregator:
        AlmaSwitchCrossEntropy.reduce_metrics([log])
    assert "balance_loss" not in aggregator.get_smoothed_values()


def compiled_step(monkeypatch, **options):
    """Return loss and graph breaks of a training step under torch.compile without code generation."""
    breaks = []

    def compile(function, **unused):
        def run(*args):
            breaks.append(torch._dynamo.explain(function)(*args).graph_break_count)
            return compile_here(function, backend="eager", dynamic=False)(*args)

        return run

    compile_here = torch.compile
    monkeypatch.setattr(torch, "compile", compile)
    plain, twin = model_of(decoder_layers=2, **options), model_of(decoder_layers=2, compile=True, **options)
    sample = sample_of()
    losses = [criterion_of()(model.train(), sample)[0] for model in (plain, twin)]
    torch.testing.assert_close(*losses)
    return breaks


def test_a_compiled_dense_step_is_one_graph_and_computes_the_same(monkeypatch):
    assert compiled_step(monkeypatch, moe_freq=0) == [0]


def test_a_compiled_step_with_experts_computes_the_same(monkeypatch):
    assert len(compiled_step(monkeypatch)) == 1


def test_only_training_is_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", None)
    criterion_of()(model_of(compile=True).eval(), sample_of())
