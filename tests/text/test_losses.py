"""The criterion of language models, its chunked cross entropy, and the joint losses of an ensemble."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.logging import metrics

from fairseq_alma.text import losses
from fairseq_alma.text.losses import AlmaSwitchCrossEntropy, joint_losses, linear_cross_entropy, token_losses
from tests.text.models import model_of, transformer_of

PAD = 1
GENERATOR = np.random.default_rng(0)
FOUND = {name: -GENERATOR.random((3, 7)).astype(np.float32) for name in ("valid", "test", "later")}


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


@pytest.fixture
def chunks(monkeypatch):
    """Chunks of three tokens; yields the number of tokens of each product."""
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 3 * 11)  # vocabulary size eleven
    rows, linear = [], F.linear
    monkeypatch.setattr(F, "linear", lambda x, *more: rows.append(len(x)) or linear(x, *more))
    return rows


@pytest.fixture
def inputs(chunks):
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


def losses_of(members, splits=("valid", "test"), text="text", **files):
    """Return (losses of an ensemble of members a, b, c, …, members and splits that were tested)."""
    tested = []

    def log_probs(number, some):
        tested.append((number, *some))
        return [(split, FOUND[split]["abc".index(members[number])]) for split in some]

    return joint_losses(text, members, splits, log_probs, **files), tested


def test_the_loss_is_that_of_the_mean_probability_in_bits():
    probs = np.exp(FOUND["test"][:2].astype(float)).mean(0)
    assert losses_of("ab")[0]["test"] == pytest.approx(-np.log2(probs).mean(), rel=1e-12)


def test_infinite_losses_do_not_count_as_in_fairseq():
    log_probs = np.array([-np.inf, np.log(0.5)])
    assert joint_losses("text", "a", ["test"], lambda *_: [("test", log_probs)]) == {"test": pytest.approx(1)}


@pytest.mark.parametrize("name", ["known", "out"])
def test_a_later_ensemble_tests_only_new_members_and_has_the_same_bits(tmp_path, name):
    losses_of("ab", out=tmp_path / "kept.npz")
    losses, tested = losses_of("abc", **{"out": tmp_path / "none.npz", name: tmp_path / "kept.npz"})
    assert tested == [(2, "valid", "test")]
    assert losses == losses_of("abc")[0]


def test_all_members_are_tested_on_a_new_split(tmp_path):
    splits = ("valid", "test", "later")
    losses_of("ab", out=tmp_path / "kept.npz")
    losses, tested = losses_of("abc", splits, known=tmp_path / "kept.npz")
    assert tested == [(0, "later"), (1, "later"), (2, "valid", "test", "later")]
    assert losses == losses_of("abc", splits)[0]


@pytest.mark.parametrize("other", ["members", "text", "damaged"])
def test_sums_of_other_members_or_text_and_damaged_files_are_ignored(tmp_path, other):
    path = tmp_path / "kept.npz"
    losses_of("b" if other == "members" else "a", text="other text" if other == "text" else "text", out=path)
    if other == "damaged":
        path.write_bytes(path.read_bytes()[:-30])
    assert len(losses_of("ab", known=path)[1]) == 2
