from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fairseq import models
from omegaconf import OmegaConf
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fairseq_alma.checkpoints.model_facts import describe_model
from fairseq_alma.errors import AlmaError
from fairseq_alma.text.criterion import AlmaSwitchCrossEntropy
from tests.text.switch_models import dictionary_of

SMALL = "--decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2 --dropout 0"


def task_of(num_tokens=46):
    dictionary = dictionary_of(num_tokens)
    return SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)


def config_of(**options):
    config = {
        "_name": "alma_umix",
        "num_members": 3,
        "member_arch": "alma_switch_lm_tiny",
        "member_options": SMALL,
        "tokens_per_sample": 24,
        "max_target_positions": None,
        **options,
    }
    return OmegaConf.create(config)


def umix_of(seed=0, **options):
    torch.manual_seed(seed)
    return models.build_model(config_of(**options), task_of())


def tokens_of(*shape):
    return torch.randint(4, 50, shape, generator=torch.Generator().manual_seed(3))


def test_logits_are_the_mean_of_the_members_logits():
    model, tokens = umix_of().eval(), tokens_of(2, 10)
    members = [member(tokens)[0] for member in model.decoder.members]
    torch.testing.assert_close(model(tokens)[0], sum(members) / 3)
    assert not torch.allclose(members[0], members[1])


def test_members_are_told_that_nothing_is_padding():
    model, tokens = umix_of().eval(), tokens_of(2, 10)
    tokens[:, -1] = 1  # padding, if it was asked for
    got = model(tokens, is_padded=False)[0]
    torch.testing.assert_close(got, sum(member(tokens, is_padded=False)[0] for member in model.decoder.members) / 3)
    assert not torch.allclose(got, model(tokens)[0])


def test_the_product_of_the_output_factors_is_the_logits():
    model, tokens = umix_of().eval(), tokens_of(2, 10)
    features, weight = model.output_factors(*model(tokens, features_only=True))
    torch.testing.assert_close(features @ weight.t(), model(tokens)[0])


def test_the_criterion_gives_the_gradients_of_the_mean_of_the_logits_plus_each_member_s_balance_loss():
    model, tokens = umix_of().train(), tokens_of(2, 11)
    inputs, target = tokens[:, :-1], tokens[:, 1:]
    sample = {"net_input": {"src_tokens": inputs}, "target": target, "ntokens": target.numel()}
    criterion = AlmaSwitchCrossEntropy(task_of(), sentence_avg=False)
    loss, _, log = criterion(model, sample)
    loss.backward()
    got = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    outputs = [member(inputs) for member in model.decoder.members]
    mean = sum(logits for logits, _ in outputs) / 3
    want = F.cross_entropy(mean.flatten(0, 1), target.flatten(), reduction="sum")
    for _, extra in outputs:
        want = want + 0.01 * sum(layer.balance_loss for layer in extra["switch"]) * target.numel()
    want.backward()
    torch.testing.assert_close(loss, want)
    assert {"switch0_balance", "switch2_balance"} <= set(log)  # one Switch layer in each of the three members
    for a, b in zip(got, (parameter.grad for parameter in model.parameters()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_decoding_step_by_step_equals_the_whole_sequence():
    model, tokens = umix_of().eval(), tokens_of(3, 12)
    state = {}
    got = [model.decoder(tokens[:, : step + 1], incremental_state=state)[0] for step in range(12)]
    torch.testing.assert_close(torch.cat(got, dim=1), model(tokens)[0], rtol=1e-4, atol=1e-5)


def test_a_mixture_of_one_is_its_member():
    model, tokens = umix_of(num_members=1).eval(), tokens_of(2, 10)
    assert torch.equal(model(tokens)[0], model.decoder.members[0](tokens)[0])


def test_members_have_the_options_that_were_given_and_the_architecture_s_own_elsewhere():
    decoder = umix_of(member_options=SMALL + " --num-experts 6 --moe-freq 1").decoder.members[0].decoder
    assert [layer.switch.experts.num_experts for layer in decoder.layers] == [6, 6]
    assert umix_of(num_members=1, member_options="").decoder.members[0].decoder.embed_tokens.embedding_dim == 128


@pytest.mark.parametrize("options", [SMALL, SMALL + " --num-experts 2 --moe-freq 1", SMALL + " --moe-freq 0"])
def test_the_facts_are_those_of_the_module(options, tmp_path):
    model = umix_of(member_options=options).train()
    facts = describe_model(config_of(member_options=options), model.state_dict(), tmp_path)
    assert facts.num_members == 3
    assert facts.num_params == sum(parameter.numel() for parameter in model.parameters())
    model.apply(lambda module: setattr(module, "capacity_factor", 0.0))  # no token dropped: all are counted
    tokens = tokens_of(2, 24)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(tokens)
    assert counter.get_total_flops() == facts.test_flops_per_token * tokens.numel()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_members": 0}, "--num-members 0"),
        ({"member_arch": "alma_vggg"}, "--member-arch alma_vggg: .*alma_switch_lm_base"),
        ({"member_arch": "alma_umix"}, "--member-arch alma_umix: cannot be a member"),
        ({"member_arch": "alma_ensemble"}, "--member-arch alma_ensemble: cannot be a member"),
        ({"member_options": "--expert 3"}, "--member-options: unrecognized arguments: --expert 3"),
        ({"member_options": "--num-experts three"}, "--member-options: .*invalid int value: 'three'"),
        ({"member_options": "--num-experts '3"}, "--member-options: .*No closing quotation"),
        ({"member_options": "--num-experts 0"}, "--num-experts 0"),
        ({"joint_logits": "sum"}, "--joint-logits sum: is for image models"),
    ],
)
def test_options_that_do_not_fit_are_named_in_one_line(options, named):
    with pytest.raises(AlmaError, match=named) as error:
        umix_of(**options)
    assert "\n" not in str(error.value)
