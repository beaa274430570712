"""Optimizers against fairseq's Adam and torch's AdamW and Muon."""

import re

import pytest
import torch
from fairseq import optim
from fairseq.optim.adam import FairseqAdamConfig
from omegaconf import OmegaConf

import fairseq_alma.optim
from fairseq_alma.errors import AlmaError
from fairseq_alma.optim import FusedAdamConfig, MuonConfig, orthogonalize
from tests.text.models import model_of

CONFIGS = {"adam": FairseqAdamConfig, "fused_adam": FusedAdamConfig, "muon": MuonConfig}
SHAPES = ((6, 4), (4, 6), (3, 6, 4), (5,), (7, 4), (8, 4))
MARKS = {4: "embedding", 5: "adam"}


def parameters_of(shapes=SHAPES, marks=MARKS):
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for index, mark in marks.items():
        parameters[index].param_group = mark
    return parameters


def optimizer_of(name, parameters, lr=0.02, **options):
    cfg = OmegaConf.structured(CONFIGS[name](**options))
    cfg.lr = [lr]
    if name == "adam":
        cfg.tpu = False
    return optim.OPTIMIZER_REGISTRY[name](cfg, parameters)


def step(optimizer, parameters, update=0):
    generator = torch.Generator().manual_seed(100 + update)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def assert_same_updates(ours, our_optimizer, theirs, their_optimizer, but=(), **tolerance):
    for update in range(3):
        step(our_optimizer, ours, update)
        step(their_optimizer, theirs, update)
    for index in {*range(len(ours))}.difference(but):
        torch.testing.assert_close(ours[index], theirs[index], **tolerance)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}])
def test_fused_adam_equals_adam_of_fairseq(options):
    ours, theirs = parameters_of(marks={}), parameters_of(marks={})
    fused, reference = optimizer_of("fused_adam", ours, **options), optimizer_of("adam", theirs, **options)
    assert_same_updates(ours, fused, theirs, reference)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_muon_equals_torch_muon_on_one_matrix(shape, monkeypatch):
    ours, theirs = parameters_of([shape], {}), parameters_of([shape], {})
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)  # torch iterates in bf16
    optimizer = optimizer_of("muon", ours, weight_decay=0.1)
    assert_same_updates(ours, optimizer, theirs, reference, rtol=1e-4, atol=1e-5)


def test_muon_updates_a_stack_like_its_single_matrices_in_batches_of_any_size(monkeypatch):
    stack = parameters_of([(3, 6, 4)], {})
    singles = [torch.nn.Parameter(each.clone()) for each in stack[0].detach()]
    step(optimizer_of("muon", stack), stack)
    for single, grad in zip(singles, stack[0].grad, strict=True):
        single.grad = grad.clone()
    monkeypatch.setattr(fairseq_alma.optim, "MAX_BATCH_SIZE", 50)  # two of the three matrices
    optimizer_of("muon", singles).step()
    torch.testing.assert_close(stack[0], torch.stack(singles))


def test_orthogonalization_moves_singular_values_close_to_one():
    scales = torch.tensor([1e-4, 1, 1e4])[:, None, None]
    matrices = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(1)) * scales
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert values.min() > 0.6 and values.max() < 1.3


@pytest.mark.parametrize(
    ("name", "adam", "options"),
    [
        ("muon", [3, 5], {"adam_lr_factor": 0.5, "embedding_lr_factor": 4.0}),
        ("fused_adam", [0, 1, 2, 3, 5], {"embedding_lr_factor": 2.0, "adam_betas": (0.9, 0.99), "adam_eps": 1e-10}),
    ],
)
def test_learning_rates_depend_on_the_kind_of_parameter_also_after_a_schedule_sets_the_rate(name, adam, options):
    ours, theirs = parameters_of(), parameters_of()
    optimizer = optimizer_of(name, ours, lr=1.0, **options)
    optimizer.set_lr(0.02)
    rate = 0.01 if name == "muon" else 0.02
    groups = [{"params": [theirs[index] for index in adam], "lr": rate}, {"params": [theirs[4]], "lr": 0.04}]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-10, weight_decay=0.0)
    assert_same_updates(ours, optimizer, theirs, reference, but={0, 1, 2}.difference(adam))


@pytest.mark.parametrize("name", ["muon", "fused_adam"])
def test_a_resumed_optimizer_is_bit_identical_and_numbers_its_state_in_the_order_of_the_model(name):
    def trained(resume_at):
        parameters = parameters_of()
        optimizer = optimizer_of(name, parameters)
        for update in range(6):
            if update == resume_at:
                state = optimizer.state_dict()
                assert [sorted(state["state"]), state["param_groups"][0]["params"]] == [[*range(6)]] * 2
                for number, parameter in enumerate(parameters):
                    moments = [each for each in state["state"][number].values() if each.dim()]
                    assert moments and all(each.shape == parameter.shape for each in moments)
                optimizer = optimizer_of(name, parameters)
                optimizer.load_state_dict(state)
            step(optimizer, parameters, update)
        return torch.cat([parameter.detach().flatten() for parameter in parameters])

    assert torch.equal(trained(None), trained(3))


def test_muon_leaves_stacked_biases_of_experts_gates_and_embeddings_to_adam():
    parameters = dict(model_of().named_parameters())
    of_muon = {id(each) for each in optimizer_of("muon", [*parameters.values()])._optimizer.excluded}
    matrices = {name for name in parameters if re.search(r"layers.*(proj|fc[12])[._]weight", name)}
    assert {name for name, each in parameters.items() if id(each) in of_muon} == matrices


def test_clipping_uses_the_norm_of_all_parameters():
    parameters = parameters_of()
    optimizer = optimizer_of("muon", parameters)
    step(optimizer, parameters)
    before = torch.cat([each.grad.flatten() for each in parameters])
    torch.testing.assert_close(optimizer.clip_grad_norm(1.0), before.norm())
    torch.testing.assert_close(torch.cat([each.grad.flatten() for each in parameters]), before / before.norm())


@pytest.mark.parametrize("betas", ["0.9", "(0.9)", "(0.9, 1)", "(0.9, 0.99, 0.9)", "'(0.9, 0.99)'", "beta"])
def test_invalid_betas_get_one_line(betas):
    with pytest.raises(AlmaError, match=r"--adam-betas .*: expected two numbers from 0 to below 1"):
        optimizer_of("muon", parameters_of(), adam_betas=betas)
