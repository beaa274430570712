import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fairseq_alma.checkpoints.model_facts import facts_of_weights
from fairseq_alma.errors import AlmaError
from tests.text.models import config_of, model_of, transformer_of

PAD = 1
EACH = {
    "alma_switch_lm": model_of,
    "sinusoidal": lambda **options: model_of(decoder_sinusoidal_pos=True, **options),
    "alma_transformer_lm": transformer_of,
    "grouped queries": lambda **options: transformer_of(num_experts=1, num_kv_heads=1, head_dim=6, **options),
}
each_model = pytest.mark.parametrize("build", EACH.values(), ids=EACH)

# Table 2 of the paper: experts -> parameters in millions, with a vocabulary of 50,000
PAPER = {"base": {4: 65, 8: 91, 12: 116}, "large": {4: 210, 8: 323, 12: 436}}
SIZES = {
    "base": {
        "decoder_layers": 6,
        "decoder_embed_dim": 512,
        "decoder_ffn_embed_dim": 2048,
        "decoder_attention_heads": 8,
    },
    "large": {
        "decoder_layers": 12,
        "decoder_embed_dim": 768,
        "decoder_ffn_embed_dim": 3072,
        "decoder_attention_heads": 12,
    },
}


@pytest.mark.parametrize("size", ["base", "large"])
@pytest.mark.parametrize("num_experts", [4, 8, 12])
def test_parameters_are_within_three_percent_of_the_paper_s(size, num_experts):
    options = {**SIZES[size], "num_experts": num_experts, "tokens_per_sample": 512}
    with torch.device("meta"):  # no weight is allocated
        model = model_of(num_tokens=50_000, **options)
    num_params = sum(p.numel() for p in model.parameters())
    assert num_params == pytest.approx(PAPER[size][num_experts] * 1e6, rel=0.03)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_experts": 1},
        {"moe_freq": 0},
        {"decoder_layers": 5, "moe_freq": 1, "num_experts": 3},
        {"gate_trees": "[[0,1,[2,3]],[0,[1,[2,3]]]]"},
    ],
)
def test_formulas_give_the_parameters_of_the_module_and_the_flops_of_the_counter(options):
    model = model_of(**options).train()
    facts = facts_of_weights(model.state_dict(), config_of(**options).tokens_per_sample)
    assert facts.num_params == sum(p.numel() for p in model.parameters())
    model.decoder.layers.apply(lambda m: setattr(m, "capacity_factor", 0.0))  # no token dropped: all are counted
    tokens = torch.randint(4, 50, (3, 24))
    with FlopCounterMode(display=False) as forward, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(tokens)
    assert forward.get_total_flops() == facts.test_flops_per_token * tokens.numel()
    with FlopCounterMode(display=False) as training, sdpa_kernel(SDPBackend.MATH):
        model(tokens)[0].sum().backward()
    assert training.get_total_flops() == facts.train_flops_per_token * tokens.numel()


def test_embeddings_are_shared_between_input_and_output():
    decoder = model_of().decoder
    assert decoder.output_projection.weight is decoder.embed_tokens.weight


def test_every_second_layer_is_a_switch_layer():
    assert [layer.switch is not None for layer in model_of().decoder.layers] == [False, True, False, True]


@each_model
def test_no_position_sees_a_later_one(build):
    model = build().eval()
    tokens = torch.randint(4, 50, (2, 20))
    changed = tokens.clone()
    changed[:, 12:] = torch.randint(4, 50, (2, 8))
    torch.testing.assert_close(model(tokens)[0][:, :12], model(changed)[0][:, :12])
    assert not torch.allclose(model(tokens)[0][:, 12:], model(changed)[0][:, 12:])


@each_model
def test_padding_on_the_right_changes_nothing(build):
    model = build().eval()
    tokens = torch.randint(4, 50, (2, 15))
    padded = torch.cat([tokens, torch.full((2, 7), PAD)], dim=1)
    torch.testing.assert_close(model(padded)[0][:, :15], model(tokens)[0])


@each_model
def test_decoding_step_by_step_equals_the_whole_sequence(build):
    model = build().eval()
    tokens = torch.randint(4, 50, (3, 20))
    want = model(tokens)[0]
    state = {}
    got = [model.decoder(tokens[:, : step + 1], incremental_state=state)[0] for step in range(20)]
    torch.testing.assert_close(torch.cat(got, dim=1), want, rtol=1e-4, atol=1e-5)


@each_model
def test_beam_search_may_reorder_the_cache(build):
    model = build().eval()
    tokens = torch.randint(4, 50, (2, 10))
    state = {}
    for step in range(9):
        model.decoder(tokens[:, : step + 1], incremental_state=state)
    model.decoder.reorder_incremental_state_scripting(state, torch.tensor([1, 0]))
    got = model.decoder(tokens[[1, 0]], incremental_state=state)[0]
    torch.testing.assert_close(got[:, 0], model(tokens[[1, 0]])[0][:, -1], rtol=1e-4, atol=1e-5)


@each_model
def test_recomputing_layers_changes_no_gradient(build):
    tokens = torch.randint(4, 50, (2, 12))

    def gradients(**options):
        model = build(**options).train()
        model(tokens)[0].square().mean().backward()
        return [p.grad for p in model.parameters()]

    for a, b in zip(gradients(checkpoint_activations=True), gradients(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_model_runs_in_bf16_on_a_cpu():
    tokens = torch.randint(4, 50, (2, 12))
    assert model_of().eval().bfloat16()(tokens)[0].dtype == torch.bfloat16
    dense = model_of(moe_freq=0).eval()  # as rounding may send a token to another expert
    want = dense(tokens)[0]
    got = dense.bfloat16()(tokens)[0]
    assert (got.float() - want).norm() / want.norm() < 0.05


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_experts": 0}, "--num-experts 0"),
        ({"moe_freq": -1}, "--moe-freq -1"),
        ({"decoder_attention_heads": 3}, "--decoder-attention-heads 3"),
        ({"gate_trees": "[[0,1]]"}, "--gate-trees"),
        ({"gate_trees": "[[0,1,2],[0,1,2]]"}, "but --num-experts is 4"),
        ({"gate_trees": "[[0,1,2"}, "not JSON"),
        ({"gate_trees": "[[0,1,2,2],[0,1,2,3]]"}, "each once"),
    ],
)
def test_options_that_do_not_fit_are_named_in_one_line(options, named):
    with pytest.raises(AlmaError, match=named) as error:
        model_of(**options)
    assert "\n" not in str(error.value)
