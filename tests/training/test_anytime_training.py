"""Carried stages, averages and branches in the stock commands."""

import pytest
import torch

from fairseq_alma.checkpoints.checkpoint_file import find_average
from fairseq_alma.cli.ensemble import main as ensemble
from fairseq_alma.cli.grow import main as grow
from fairseq_alma.errors import AlmaError
from tests.text.stock_commands import train_model

AVERAGED = ("--ema-half-life", "1/8")


def load(path):
    return torch.load(path, weights_only=True)


def stage(start, *arguments):
    return ["--megabatch", "2", "--continue-once", str(start), "--continue-as", "stage", *arguments]


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def averaged(trained, tmp_path_factory):
    """A checkpoint of 20 updates with an average of its weights."""
    return train_model(trained.stream, tmp_path_factory.mktemp("averaged"), "--megabatch", "1", *AVERAGED)


def test_a_carried_stage_continues_optimizer_and_updates_but_not_the_position_in_the_data(trained, tmp_path):
    after = load(train_model(trained.stream, tmp_path, *stage(trained.checkpoint, "--max-update", "25")))
    assert after["optimizer_history"][-1]["num_updates"] == 25
    assert after["extra_state"]["AlmaLMTask"]["first_update"] == 20
    assert after["extra_state"]["train_iterator"]["iterations_in_epoch"] == 5 * 4
    assert {float(entry["step"]) for entry in after["last_optimizer_state"]["state"].values()} == {25.0}


def test_a_resumed_stage_ends_with_the_same_weights_average_and_moments(averaged, trained, tmp_path):
    whole = train_model(trained.stream, tmp_path / "whole", *stage(averaged, "--max-update", "30", *AVERAGED))
    for end in ("26", "30"):  # as after a kill at the checkpoint of update 26
        parts = train_model(trained.stream, tmp_path / "parts", *stage(averaged, "--max-update", end, *AVERAGED))
    whole, parts = load(whole), load(parts)
    assert same(whole["model"], parts["model"])
    assert same(find_average(whole)["average"], find_average(parts)["average"])
    moments = [each["last_optimizer_state"]["state"][3] for each in (whole, parts)]
    assert torch.equal(moments[0]["exp_avg_sq"], moments[1]["exp_avg_sq"])
    counts = [each["extra_state"]["AlmaLMTask"] for each in (whole, parts)]
    assert counts[0]["train_tokens"] == counts[1]["train_tokens"] and counts[0]["first_update"] == 20


def test_an_average_grows_like_its_model(averaged, trained, tmp_path):
    options = ["--method", "split", "--experts", "2", "--optimizer", "share", "--stream", str(trained.stream), "--cpu"]
    grow(["--path", str(averaged), "--out", str(tmp_path / "grown.pt"), *options])
    grown = load(tmp_path / "grown.pt")
    average = find_average(grown)["average"]
    gate = next(name for name in average if name.endswith("gate.weight"))
    assert torch.equal(average[gate][4:], grown["model"][gate][4:])  # the same new rows
    (record,) = grown["alma_growth"][0]["layers"].values()
    experts = next(name for name in average if name.endswith("fc1_weight"))
    assert torch.equal(average[experts], find_average(load(averaged))["average"][experts][record["expert_source"]])


def test_the_average_follows_its_formula(trained, tmp_path):
    expected = None
    for update in (1, 2, 3):
        folder = tmp_path / str(update)
        last = load(train_model(trained.stream, folder, "--megabatch", "1", "--max-update", str(update), *AVERAGED))
        weights = last["model"]["decoder.embed_tokens.weight"]
        share = 2 ** (-8 / update)
        expected = weights if expected is None else share * expected + (1 - share) * weights
    ensemble([str(folder / "checkpoint_last.pt"), "--average", "--out", str(tmp_path / "average.pt")])
    average = load(tmp_path / "average.pt")["model"]
    torch.testing.assert_close(average["decoder.embed_tokens.weight"], expected)
    assert torch.equal(average["decoder.embed_tokens.weight"], average["decoder.output_projection.weight"])


def test_a_branch_continues_with_the_next_batches(trained, tmp_path):
    trunk = ["--megabatch", "1", "--max-update"]
    split = train_model(trained.stream, tmp_path / "trunk", *trunk, "6")
    begin = ["--continue-once", str(split), "--continue-as", "branch"]
    branch = load(train_model(trained.stream, tmp_path / "branch", *trunk, "10", *begin))
    assert branch["extra_state"]["AlmaLMTask"]["first_update"] == 6
    stopped = [*begin, "--branch-from", "6", "--branch-until", "7"]
    decayed = load(train_model(trained.stream, tmp_path / "decayed", *trunk, "10", *stopped))
    before = load(train_model(trained.stream, tmp_path / "one-more", *trunk, "7", *begin))
    whole = load(train_model(trained.stream, tmp_path / "trunk", *trunk, "10"))
    assert same(branch["model"], whole["model"])  # equal to the training without a decay
    assert same(decayed["model"], before["model"])  # the first update has the full rate, the others have zero


def test_an_unsuitable_carried_stage_is_rejected(trained, tmp_path):
    bare = load(trained.checkpoint)
    del bare["last_optimizer_state"]
    torch.save(bare, tmp_path / "bare.pt")
    for words, message in (
        (["--megabatch", "2", "--continue-as", "stage"], "--continue-as stage: needs a starting checkpoint"),
        (stage(trained.checkpoint, "--optimizer", "sgd"), "expected optimizer SGD, found FairseqAdam"),
        (stage(tmp_path / "bare.pt"), "bare.pt: has no optimizer state"),
        (["--megabatch", "2", "--branch-from", "10"], "--branch-from 10, --branch-until None: expected both options"),
        (["--megabatch", "2", "--branch-from", "3", "--branch-until", "3"], "with --branch-from below --branch-until"),
    ):
        with pytest.raises(AlmaError, match=message):
            train_model(trained.stream, tmp_path / "m", *words)
