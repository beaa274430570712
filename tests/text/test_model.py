"""Both language models: sizes, causality, padding, decoding step by step, recomputation, options."""

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fairseq_alma.errors import AlmaError
from fairseq_alma.text.stage_checkpoints import describe_model
from tests.text.models import model_of, transformer_of

PAD = 1
EACH = {
    "alma_switch_lm": model_of,
    "sinusoidal": lambda **options: model_of(decoder_sinusoidal_pos=True, **options),
    "alma_transformer_lm": transformer_of,
    "grouped queries": lambda **options: transformer_of(num_experts=1, num_kv_heads=1, head_dim=6, **options),
}
each_model = pytest.mark.parametrize("build", EACH.values(), ids=EACH)
TREES = "[[0,[1,2]],[0,1,2]]"

# Table 2 of the paper: experts -> parameters in millions, with a vocabulary of 50,000
PAPER = {"base": {4: 65, 8: 91, 12: 116}, "large": {4: 210, 8: 323, 12: 436}}
SIZES = {"base": (6, 512, 2048, 8), "large": (12, 768, 3072, 12)}
SIZE_OPTIONS = ("decoder_layers", "decoder_embed_dim", "decoder_ffn_embed_dim", "decoder_attention_heads")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_experts", [4, 8, 12])
def test_parameters_are_within_three_percent_of_the_paper(size, num_experts):
    options = {**dict(zip(SIZE_OPTIONS, SIZES[size], strict=True)), "num_experts": num_experts}
    with torch.device("meta"):  # no weight is allocated
        model = model_of(num_tokens=50_000, tokens_per_sample=512, **options)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(PAPER[size][num_experts] * 1e6, rel=0.03)


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (model_of, {}),
        (model_of, {"num_experts": 1}),
        (model_of, {"moe_freq": 0}),
        (model_of, {"decoder_layers": 5, "moe_freq": 1, "num_experts": 3}),
        (model_of, {"gate_trees": "[[0,1,[2,3]],[0,[1,[2,3]]]]"}),
        (transformer_of, {}),
        (transformer_of, {"num_experts": 3, "decoder_layers": 4, "gate_trees": TREES}),
        (transformer_of, {"decoder_attention_heads": 4, "num_kv_heads": 2, "head_dim": 6}),
        (transformer_of, {"share_decoder_input_output_embed": True}),
    ],
)
def test_formulas_give_the_parameters_of_the_module_and_the_flops_of_the_counter(build, options):
    model = build(**options).train()
    config = {"_name": "alma_switch_lm", "tokens_per_sample": 24}
    facts = describe_model(config, model.state_dict(), Path("checkpoint.pt"))
    assert facts.num_params == sum(p.numel() for p in model.parameters())
    model.decoder.layers.apply(lambda m: setattr(m, "capacity_factor", 0.0))  # no token dropped: all are counted
    tokens = torch.randint(4, 50, (3, 24))
    with FlopCounterMode(display=False) as forward, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(tokens)
    assert forward.get_total_flops() == facts.test_flops_per_token * tokens.numel()
    with FlopCounterMode(display=False) as training, sdpa_kernel(SDPBackend.MATH):
        model(tokens)[0].sum().backward()
    if build is model_of:
        assert training.get_total_flops() == 3 * facts.test_flops_per_token * tokens.numel()


@each_model
def test_a_position_depends_on_earlier_positions_only(build):
    model, tokens = build().eval(), torch.randint(4, 50, (2, 20))
    changed = tokens.clone()
    changed[:, 12:] = torch.randint(4, 50, (2, 8))
    torch.testing.assert_close(model(tokens)[0][:, :12], model(changed)[0][:, :12])
    assert not torch.allclose(model(tokens)[0][:, 12:], model(changed)[0][:, 12:])


@each_model
def test_padding_on_the_right_changes_no_logit(build):
    model, tokens = build().eval(), torch.randint(4, 50, (2, 15))
    padded = torch.cat([tokens, torch.full((2, 7), PAD)], dim=1)
    torch.testing.assert_close(model(padded)[0][:, :15], model(tokens)[0])


@each_model
def test_decoding_step_by_step_equals_the_full_sequence_also_after_a_reordering(build):
    model, tokens, state = build().eval(), torch.randint(4, 50, (2, 20)), {}
    steps = [model.decoder(tokens[:, : step + 1], incremental_state=state)[0] for step in range(19)]
    want = model(tokens)[0]
    torch.testing.assert_close(torch.cat(steps, dim=1), want[:, :19], rtol=1e-4, atol=1e-5)
    model.decoder.reorder_incremental_state_scripting(state, torch.tensor([1, 0]))
    last = model.decoder(tokens[[1, 0]], incremental_state=state)[0]
    torch.testing.assert_close(last[:, 0], want[[1, 0], -1], rtol=1e-4, atol=1e-5)


@each_model
def test_recomputed_layers_have_the_same_gradients(build):
    tokens = torch.randint(4, 50, (2, 12))

    def gradients(**options):
        model = build(**options).train()
        model(tokens)[0].square().mean().backward()
        return [p.grad for p in model.parameters()]

    for a, b in zip(gradients(checkpoint_activations=True), gradients(), strict=True):
        torch.testing.assert_close(a, b)


EXPERTS = {"num_experts": 3, "decoder_layers": 4}


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (model_of, {"num_experts": 0}, "--num-experts 0"),
        (model_of, {"moe_freq": -1}, "--moe-freq -1"),
        (model_of, {"decoder_attention_heads": 3}, "--decoder-attention-heads 3"),
        (model_of, {"gate_trees": "[[0,1]]"}, "--gate-trees"),
        (model_of, {"gate_trees": "[[0,1,2],[0,1,2]]"}, "but --num-experts is 4"),
        (model_of, {"gate_trees": "[[0,1,2"}, "not JSON"),
        (model_of, {"gate_trees": "[[0,1,2,2],[0,1,2,3]]"}, "each exactly once"),
        (transformer_of, {"decoder_attention_heads": 3}, "--decoder-attention-heads 3: must divide .* 16"),
        (transformer_of, {"decoder_attention_heads": 4, "num_kv_heads": 3}, "--num-kv-heads 3: must divide the 4"),
        (transformer_of, {"moe_freq": 0, **EXPERTS}, "--moe-freq 0: gives no Switch layer in 4 layers; give 1 to 4"),
        (transformer_of, {"symbol_ids": "[1]"}, "--symbol-ids '.1.': expected a JSON list of four"),
    ],
)
def test_contradicting_options_are_refused_in_one_line(build, options, message):
    with pytest.raises(AlmaError, match=message) as error:
        build(**options)
    assert "\n" not in str(error.value)
