import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from fairseq import models
from fairseq.sequence_generator import SequenceGenerator
from fairseq.sequence_scorer import SequenceScorer
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_alma.errors import AlmaError
from tests.models.ensembles import (
    NUM_TOKENS,
    load,
    save_ensemble,
    save_member,
    switch_config,
    task_of,
    transformer_config,
)
from tests.text.models import transformer_config as alma_transformer_config

EOS = 2


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Four models: two sizes, the default architecture, and a stock one."""
    folder = tmp_path_factory.mktemp("members")
    configs = [
        switch_config(),
        switch_config(decoder_layers=2, decoder_embed_dim=8, num_experts=2, tokens_per_sample=20),
        alma_transformer_config(num_experts=2),
        transformer_config(),
    ]
    return [save_member(folder / f"{seed}.pt", config, seed) for seed, config in enumerate(configs)]


@pytest.fixture(scope="module")
def folder(paths, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ensembles")
    save_ensemble(folder / "referring.pt", paths)
    save_ensemble(folder / "weighted.pt", paths, [0.1, 0.2, 0.3, 0.4])
    save_ensemble(folder / "embedded.pt", paths, embed=True)
    return folder


def tokens_of(*shape):
    return torch.randint(4, NUM_TOKENS + 4, shape, generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def mean_probabilities(paths, tokens, weights):
    """Return what a plain script computes: softmax of each member in double precision, then the weighted mean."""
    members = zip(paths, weights, strict=True)
    return sum(weight * load(path)(tokens)[0].double().softmax(dim=-1) for path, weight in members)


@pytest.mark.parametrize(
    ("name", "weights"), [("referring", [0.25] * 4), ("embedded", [0.25] * 4), ("weighted", [0.1, 0.2, 0.3, 0.4])]
)
def test_probabilities_are_the_mean_of_the_members(folder, paths, name, weights):
    model, tokens = load(folder / f"{name}.pt"), tokens_of(3, 12)
    got = model.get_normalized_probs(model(tokens), log_probs=True)
    torch.testing.assert_close(got.double().exp(), mean_probabilities(paths, tokens, weights), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("softmax_batch", [None, 5])
def test_perplexity_equals_that_of_the_members_mean_probabilities(folder, paths, softmax_batch):
    tokens = tokens_of(4, 15)
    sample = {"net_input": {"src_tokens": tokens[:, :-1]}, "target": tokens[:, 1:]}
    scorer = SequenceScorer(task_of().source_dictionary, softmax_batch)
    hypotheses = scorer.generate([load(folder / "referring.pt")], sample)
    scores = torch.cat([each[0]["positional_scores"] for each in hypotheses])
    probabilities = mean_probabilities(paths, tokens[:, :-1], [0.25] * 4).gather(2, tokens[:, 1:, None])
    want = math.exp(-probabilities.log().mean().item())
    assert math.exp(-scores.double().mean().item()) == pytest.approx(want, rel=1e-5)


def test_a_member_of_weight_zero_has_no_effect(paths, tmp_path):
    model, tokens = load(save_ensemble(tmp_path / "E.pt", paths[:2], [0.0, 1.0])), tokens_of(2, 9)
    torch.testing.assert_close(model(tokens)[0], load(paths[1])(tokens)[0].log_softmax(-1))


def test_other_sequences_and_padding_have_no_effect(folder):
    model, tokens = load(folder / "referring.pt"), tokens_of(3, 12)
    alone = model(tokens[1:2, :8])[0]
    tokens[1, 8:] = 1
    torch.testing.assert_close(model(tokens)[0][1:2, :8], alone, rtol=1e-4, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that an operation gave."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, torch.Tensor):
                self.size = max(self.size, each.numel())
        return out


def test_no_array_is_larger_than_tokens_times_vocabulary(tmp_path):
    configs = [switch_config(decoder_layers=1, decoder_embed_dim=2)] * 4
    paths = [save_member(tmp_path / f"{i}.pt", config, i, num_tokens=996) for i, config in enumerate(configs)]
    model, tokens = load(save_ensemble(tmp_path / "E.pt", paths), 996), tokens_of(4, 16)
    with LargestTensor() as largest, torch.no_grad():
        model.get_normalized_probs(model(tokens), log_probs=True)
    assert largest.size == 4 * 16 * 1000


def test_members_in_half_precision_are_averaged_in_full_precision(folder):
    model, tokens = load(folder / "referring.pt"), tokens_of(2, 9)
    want = model(tokens)[0]
    got = model.bfloat16()(tokens)[0]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.logsumexp(-1), torch.zeros(2, 9), rtol=0, atol=1e-5)
    assert (got - want).norm() / want.norm() < 0.05


def test_decoding_step_by_step_equals_the_full_sequence_also_when_reordered(folder):
    model, tokens = load(folder / "referring.pt"), tokens_of(2, 10)
    state = {}
    for step in range(9):
        model.decoder(tokens[:, : step + 1], incremental_state=state)
    model.decoder.reorder_incremental_state_scripting(state, torch.tensor([1, 0]))
    got = model.decoder(tokens[[1, 0]], incremental_state=state)[0]
    torch.testing.assert_close(got[:, 0], model(tokens[[1, 0]])[0][:, -1], rtol=1e-4, atol=1e-5)


def test_scores_of_beam_search_are_those_of_the_ensemble(folder):
    model = load(folder / "referring.pt")
    beam = SequenceGenerator([model], task_of().source_dictionary, beam_size=3, max_len_b=8, normalize_scores=False)
    sample = {"net_input": {"src_tokens": tokens_of(1, 3), "src_lengths": torch.tensor([3])}}
    best = beam.generate([model], sample, prefix_tokens=tokens_of(1, 3))[0][0]
    inputs = torch.cat([torch.tensor([EOS]), best["tokens"][:-1]]).unsqueeze(0)
    log_probs = model.get_normalized_probs(model(inputs), log_probs=True)[0]
    want = log_probs.gather(1, best["tokens"].unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(best["positional_scores"], want, rtol=1e-4, atol=1e-4)


def test_the_longest_sequence_is_that_of_the_smallest_member(folder):
    assert load(folder / "referring.pt").max_positions() == 20


def test_members_are_found_after_a_move_with_the_ensemble(paths, tmp_path):
    (tmp_path / "old" / "runs").mkdir(parents=True)
    shutil.copy(paths[0], tmp_path / "old" / "runs" / "a.pt")
    save_ensemble(tmp_path / "old" / "E.pt", [tmp_path / "old" / "runs" / "a.pt"])
    (tmp_path / "old").rename(tmp_path / "new")
    load(tmp_path / "new" / "E.pt")
    shutil.move(tmp_path / "new" / "E.pt", tmp_path / "E.pt")
    with pytest.raises(AlmaError, match=r"runs/a\.pt: file of an ensemble member not found; restore the"):
        load(tmp_path / "E.pt")


def test_members_are_found_after_a_move_of_the_ensemble_only(paths, tmp_path):
    save_ensemble(tmp_path / "here" / "E.pt", paths[:2])
    (tmp_path / "there" / "below").mkdir(parents=True)
    shutil.move(tmp_path / "here" / "E.pt", tmp_path / "there" / "below" / "E.pt")
    load(tmp_path / "there" / "below" / "E.pt")


def test_a_model_with_adaptive_input_is_a_member(tmp_path):
    config = {**transformer_config(), "adaptive_input": True, "adaptive_input_cutoff": "10,20"}
    config |= {"adaptive_softmax_cutoff": "10,20", "share_decoder_input_output_embed": False}
    member = save_member(tmp_path / "a.pt", config, 0)
    load(save_ensemble(tmp_path / "E.pt", [member, member]))


@pytest.mark.parametrize("damage", ["changed", "truncated"])
def test_a_changed_member_is_refused(paths, tmp_path, damage):
    member = shutil.copy(paths[0], tmp_path / "a.pt")
    out = save_ensemble(tmp_path / "E.pt", [member])
    if damage == "changed":
        shutil.copy(paths[1], member)
    else:
        member.write_bytes(member.read_bytes()[:1000])
    with pytest.raises(AlmaError, match=r"a\.pt: changed since the ensemble was made") as error:
        load(out)
    assert "\n" not in str(error.value)


def test_an_ensemble_can_be_neither_trained_nor_read_with_another_vocabulary(folder):
    config = OmegaConf.create({"_name": "alma_ensemble", "members": None, "vocab_size": 0})
    with pytest.raises(AlmaError, match="cannot be trained"):
        models.build_model(config, task_of())
    with pytest.raises(AlmaError, match=r"have 50 tokens in the vocabulary, but the stream has 60"):
        load(folder / "referring.pt", num_tokens=56)


def test_a_task_without_the_file_name_finds_members_by_absolute_paths(paths, tmp_path):
    checkpoint = torch.load(save_ensemble(tmp_path / "E.pt", paths[:1]), weights_only=True)
    config = OmegaConf.create(checkpoint["cfg"]["model"])
    models.build_model(config, SimpleNamespace(source_dictionary=task_of().source_dictionary), from_checkpoint=True)
