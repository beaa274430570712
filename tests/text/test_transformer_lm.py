"""alma_transformer_lm: transformers' Qwen3 is the reference, dense and with experts."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from fairseq_alma.text.train_options import complete_sizes
from fairseq_alma.text.transformer_lm import CachedAttention, rotate
from tests.text import models

NUM_TOKENS = 50
transformer_config = functools.partial(models.transformer_config, decoder_layers=4)
transformer_of = functools.partial(models.transformer_of, decoder_layers=4)
MODELS = {
    "dense": {},
    "experts": {"num_experts": 3},
    "grouped": {"decoder_attention_heads": 4, "num_kv_heads": 2, "head_dim": 6},
    "tied": {"share_decoder_input_output_embed": True, "no_embedding_norm": True},
}


def tokens_of(*shape, seed=2):
    return torch.randint(4, NUM_TOKENS, shape, generator=torch.Generator().manual_seed(seed))


def qwen3_of(model, **options):
    """Return transformers' model with the weights of a model without a norm after the embeddings."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    attention, ffn_dim = model.decoder.layers[0].self_attn, model.decoder.layers[0].mlp.gate_proj.out_features
    weights = {name.replace("decoder.", "model.", 1): tensor for name, tensor in model.state_dict().items()}
    weights["lm_head.weight"] = weights.pop("model.output_projection.weight")
    sizes = {
        "vocab_size": NUM_TOKENS,
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "intermediate_size": ffn_dim,
        "num_attention_heads": attention.q_proj.out_features // attention.head_dim,
        "num_key_value_heads": attention.k_proj.out_features // attention.head_dim,
        "head_dim": attention.head_dim,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "tie_word_embeddings": options.get("share_decoder_input_output_embed", False),
    }
    if "num_experts" not in options:
        theirs = Qwen3ForCausalLM(Qwen3Config(**sizes))
    else:
        experts = {"num_experts": 3, "num_experts_per_tok": 1, "norm_topk_prob": False, "mlp_only_layers": [0, 2]}
        theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, moe_intermediate_size=ffn_dim))
        for name in [name for name in weights if name.endswith("experts.gate_proj")]:
            stem = name.removesuffix("gate_proj")
            weights[f"{stem}gate_up_proj"] = torch.cat([weights.pop(name), weights.pop(f"{stem}up_proj")], dim=1)
    theirs.load_state_dict(weights)
    return theirs.eval()


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_qwen3(name):
    options = {"no_embedding_norm": True, "rope_theta": 500.0, "norm_eps": 1e-5, **MODELS[name]}
    model = transformer_of(**options).eval()
    tokens = tokens_of(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[0], qwen3_of(model, **options)(tokens).logits, rtol=1e-4, atol=1e-4)


def test_rotation_multiplies_pairs_by_complex_numbers_of_their_position():
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(1))
    _, tables = transformer_of(rope_theta=100.0).decoder.embed(torch.full((1, 8), 4), None)
    cos, sin = (table[3:] for table in tables)
    angles = torch.arange(3, 8)[:, None, None] * 100.0 ** (-torch.arange(0, 8, 2) / 8)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rotate(x, cos, sin), torch.cat([turned.real, turned.imag], dim=-1))


@pytest.mark.parametrize("width", [16, 256])
def test_the_first_loss_is_the_logarithm_of_the_vocabulary_size(width):
    model = transformer_of(decoder_embed_dim=width, is_fresh=True)
    tokens = tokens_of(4, 24)
    loss = F.cross_entropy(model(tokens[:, :-1])[0].flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(NUM_TOKENS), abs=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_new_layers_add_nothing_and_all_of_them_learn(name):
    model = transformer_of(is_fresh=True, **MODELS[name])
    decoder, tokens = model.decoder, tokens_of(2, 12)
    torch.nn.init.zeros_(decoder.layers[0].self_attn.o_proj.weight)  # the induction head writes from the start
    embedded = decoder.embed_tokens(tokens)
    if decoder.norms_embeddings:
        embedded = embedded / embedded.square().mean(-1, keepdim=True).add(1e-6).sqrt()
    torch.testing.assert_close(model(tokens, features_only=True)[0], decoder.norm(embedded))
    model(tokens)[0].square().sum().backward()
    written = {name: each for name, each in decoder.layers.named_parameters() if name.endswith(model.residual_outputs)}
    assert len(written) == 8 and all(each.grad.abs().sum() > 0 for each in written.values())


@pytest.mark.parametrize("name", ["dense", "grouped", "tied"])
def test_a_fresh_model_attends_to_previous_tokens_and_to_tokens_after_earlier_occurrences(name, monkeypatch):
    model = transformer_of(is_fresh=True, **{**MODELS[name], "decoder_embed_dim": 128, "head_dim": 32})
    weights, unchanged = [], CachedAttention.attend

    def attend(module, query, key, *others):
        logits = (query @ key[:, :1].mT)[0, 0] / 32**0.5
        weights.append(logits.masked_fill(torch.ones(40, 40).triu(1).bool(), -math.inf).softmax(-1))
        return unchanged(module, query, key, *others)

    monkeypatch.setattr(CachedAttention, "attend", attend)
    tokens = torch.randperm(NUM_TOKENS - 4)[:20].add(4).repeat(2)  # 20 different tokens, twice
    loss = F.cross_entropy(model(tokens.unsqueeze(0))[0][0, :-1], tokens[1:])
    assert loss.item() == pytest.approx(math.log(NUM_TOKENS), abs=0.1)
    previous, after_earlier = weights[0].diagonal(-1)[20:], weights[1].diagonal(-19)[2:]
    assert previous.mean() > 0.5 and after_earlier.mean() > 0.2  # uniform attention: 0.03


def markov_text(num_tokens):
    """Return a text in which each token is followed by one of three tokens."""
    generator = torch.Generator().manual_seed(3)
    successors = torch.randint(4, NUM_TOKENS, (NUM_TOKENS, 3), generator=generator)
    text = [4]
    for choice in torch.randint(3, (num_tokens - 1,), generator=generator).tolist():
        text.append(int(successors[text[-1], choice]))
    return torch.tensor(text)


@pytest.mark.parametrize(("name", "learns"), [("dense", True), ("experts", True), ("tied", False)])
def test_a_model_initialized_from_a_text_predicts_its_bigrams(name, learns):
    model, text = transformer_of(is_fresh=True, decoder_embed_dim=64, **MODELS[name]), markov_text(6000)
    model.init_from_text(text[:5000])
    losses = F.cross_entropy(model(text[5000:-1].unsqueeze(0))[0][0], text[5001:]).item()
    frequencies = text.bincount()[4:] / len(text)
    unigram = -(frequencies * frequencies.clamp_min(1e-9).log()).sum().item()
    assert losses < 0.75 * unigram if learns else losses == pytest.approx(math.log(NUM_TOKENS), abs=0.1)
    assert model.training


@pytest.mark.parametrize("text", [[5], [5, 6], [5] * 40])
def test_weights_initialized_from_a_text_of_few_tokens_are_finite(text):
    model = transformer_of(is_fresh=True)
    model.init_from_text(torch.tensor(text))
    assert all(each.isfinite().all() for each in model.parameters())


def test_autocast_changes_logits_by_less_than_five_percent():
    model, tokens = transformer_of().eval(), tokens_of(2, 20)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        short = model(tokens)[0].float()
    exact = model(tokens)[0]
    assert (short - exact).norm() < 0.05 * exact.norm()


def test_symbols_missing_in_an_imported_vocabulary_have_almost_no_probability():
    model = transformer_of(symbol_ids="[null,7,null,null]").eval()
    logits = model(tokens_of(2, 8))[0]
    assert (logits.softmax(-1)[..., [0, 2, 3, 11]] < 1e-12).all() and (logits > -100).all()
    assert "decoder.logit_bias" not in model.state_dict()


def test_completed_options_stay_unchanged():
    options = {name: None for name in transformer_config() if not name.startswith("_")} | {"decoder_layers": 1}
    complete_sizes(options, "alma_transformer_lm_tiny")
    again = dict(options)
    complete_sizes(again, "alma_transformer_lm_tiny")
    assert again == options and options["num_experts"] == 1
