"""alma_transformer_lm: transformers' Qwen3 is the reference, dense and with experts."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fairseq_alma.checkpoints.model_facts import facts_of_weights
from fairseq_alma.checkpoints.model_options import complete_sizes
from fairseq_alma.errors import AlmaError
from fairseq_alma.text.transformer_lm import rotate
from tests.text import models

NUM_TOKENS = 50
transformer_config = functools.partial(models.transformer_config, decoder_layers=4)
transformer_of = functools.partial(models.transformer_of, decoder_layers=4)
EXPERTS = {"num_experts": 3}
MODELS = {
    "dense": {},
    "experts": EXPERTS,
    "trees": {"num_experts": 3, "gate_trees": "[[0,[1,2]],[0,1,2]]"},
    "grouped": {"decoder_attention_heads": 4, "num_kv_heads": 2, "head_dim": 6},
    "tied": {"share_decoder_input_output_embed": True, "no_embedding_norm": True},
}


@pytest.fixture(params=MODELS)
def options(request):
    return MODELS[request.param]


def tokens_of(*shape, seed=2):
    return torch.randint(4, NUM_TOKENS, shape, generator=torch.Generator().manual_seed(seed))


def qwen3_of(model, **options):
    """transformers' model with the weights of ours, which has no norm after the embeddings."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    attention = model.decoder.layers[0].self_attn
    weights = {name.replace("decoder.", "model.", 1): tensor for name, tensor in model.state_dict().items()}
    weights["lm_head.weight"] = weights.pop("model.output_projection.weight")
    sizes = {
        "vocab_size": NUM_TOKENS,
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": attention.q_proj.out_features // attention.head_dim,
        "num_key_value_heads": attention.k_proj.out_features // attention.head_dim,
        "head_dim": attention.head_dim,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "tie_word_embeddings": options.get("share_decoder_input_output_embed", False),
    }
    if "num_experts" not in options:
        sizes["intermediate_size"] = model.decoder.layers[0].mlp.gate_proj.out_features
        theirs = Qwen3ForCausalLM(Qwen3Config(**sizes))
    else:
        experts = {"num_experts": 3, "num_experts_per_tok": 1, "norm_topk_prob": False, "mlp_only_layers": [0, 2]}
        width = model.decoder.layers[0].mlp.gate_proj.out_features
        config = Qwen3MoeConfig(**sizes, **experts, intermediate_size=width, moe_intermediate_size=width)
        theirs = Qwen3MoeForCausalLM(config)
        for name in [name for name in weights if name.endswith("experts.gate_proj")]:
            stem = name.removesuffix("gate_proj")
            weights[f"{stem}gate_up_proj"] = torch.cat([weights.pop(name), weights.pop(f"{stem}up_proj")], dim=1)
    theirs.load_state_dict(weights)
    return theirs.eval()


@pytest.mark.parametrize("name", ["dense", "grouped", "tied", "experts"])
def test_logits_are_those_of_qwen3(name):
    options = {"no_embedding_norm": True, "rope_theta": 500.0, "norm_eps": 1e-5, **MODELS[name]}
    model = transformer_of(**options).eval()
    tokens = tokens_of(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[0], qwen3_of(model, **options)(tokens).logits, rtol=1e-4, atol=1e-4)


def test_rotation_multiplies_pairs_by_complex_numbers_of_their_position():
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(1))
    decoder = transformer_of(rope_theta=100.0).decoder
    cos, sin = decoder.rotary_table(3, 8, x.device)
    angles = torch.arange(3, 8)[:, None, None] * 100.0 ** (-torch.arange(0, 8, 2) / 8)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rotate(x, cos, sin), torch.cat([turned.real, turned.imag], dim=-1))


@pytest.mark.parametrize("width", [16, 256])
def test_the_first_loss_is_that_of_a_model_that_knows_nothing(width):
    model = transformer_of(decoder_embed_dim=width, is_fresh=True)
    tokens = tokens_of(4, 24)
    loss = F.cross_entropy(model(tokens[:, :-1])[0].flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(NUM_TOKENS), abs=0.01)


def test_layers_add_nothing_at_first_and_all_of_them_learn(options):
    model = transformer_of(is_fresh=True, **options)
    decoder, tokens = model.decoder, tokens_of(2, 12)
    embedded = decoder.embed_tokens(tokens)
    if decoder.norms_embeddings:
        embedded = embedded / embedded.square().mean(-1, keepdim=True).add(1e-6).sqrt()
    torch.testing.assert_close(model(tokens, features_only=True)[0], decoder.norm(embedded))
    model(tokens)[0].square().sum().backward()
    written = [name for name, _ in decoder.layers.named_parameters() if name.endswith(model.residual_outputs)]
    assert len(written) == 8
    assert all(dict(decoder.layers.named_parameters())[name].grad.abs().sum() > 0 for name in written)


def test_formulas_give_the_parameters_of_the_module_and_the_flops_of_the_counter(options):
    model = transformer_of(**options).train()
    facts = facts_of_weights(model.state_dict(), transformer_config(**options)["tokens_per_sample"])
    assert facts.num_params == sum(p.numel() for p in model.parameters())
    model.decoder.layers.apply(lambda module: setattr(module, "capacity_factor", 0.0))  # no token dropped
    tokens = tokens_of(3, 24)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(tokens)
    assert counter.get_total_flops() == facts.test_flops_per_token * tokens.numel()


def test_autocast_computes_about_the_same():
    model, tokens = transformer_of().eval(), tokens_of(2, 20)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        short = model(tokens)[0].float()
    exact = model(tokens)[0]
    assert (short - exact).norm() < 0.05 * exact.norm()


def test_symbols_that_an_imported_vocabulary_lacks_take_no_part_in_a_softmax():
    model = transformer_of(symbol_ids="[null,7,null,null]").eval()
    logits = model(tokens_of(2, 8))[0]
    probs = logits.softmax(-1)
    absent = [0, 2, 3, 11]
    assert (probs[..., absent] == 0).all() and torch.isfinite(logits).all()
    assert "decoder.logit_bias" not in model.state_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder_attention_heads": 3}, "--decoder-attention-heads 3: does not divide --decoder-embed-dim 16"),
        ({"head_dim": 5}, "--head-dim 5: is odd"),
        ({"decoder_attention_heads": 4, "num_kv_heads": 3}, "--num-kv-heads 3: must divide the 4 query heads"),
        ({"moe_freq": 5, **EXPERTS}, "--moe-freq 5: the model has 4 layers; give 1 to 4"),
        ({"moe_freq": 0, **EXPERTS}, "--moe-freq 0: the model has 4 layers; give 1 to 4"),
        ({"symbol_ids": "[1]"}, "--symbol-ids '.1.': needs a JSON list of four"),
    ],
)
def test_sizes_that_cannot_be_are_one_line(options, message):
    with pytest.raises(AlmaError, match=message):
        transformer_of(**options)


def test_a_dense_model_compiles_without_a_graph_break():
    model, tokens = transformer_of(), tokens_of(2, 20)
    compiled = torch.compile(lambda tokens: model(tokens, features_only=True)[0], fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens), model(tokens, features_only=True)[0])


def test_options_that_are_complete_stay_so_also_of_one_layer():
    options = {name: None for name in transformer_config() if not name.startswith("_")}
    options |= {"decoder_layers": 1}
    complete_sizes(options, "alma_transformer_lm_tiny")
    again = dict(options)
    complete_sizes(again, "alma_transformer_lm_tiny")
    assert again == options and options["num_experts"] == 1
