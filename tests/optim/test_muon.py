"""Muon: torch's own is the reference for one matrix; stacks, roles and resumption are ours."""

import pytest
import torch
from fairseq import optim
from omegaconf import OmegaConf

import fairseq_alma
from fairseq_alma.optim import muon
from fairseq_alma.optim.muon import MuonConfig, orthogonalize

fairseq_alma.register()
SHAPES = ((6, 4), (4, 6), (3, 6, 4), (5,), (7, 4), (8, 4))
MARKS = {4: "embedding", 5: "adam"}


def parameters_of(shapes=SHAPES, marks=MARKS):
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for index, mark in marks.items():
        parameters[index].param_group = mark
    return parameters


def optimizer_of(parameters, lr=0.02, name="muon", **options):
    cfg = OmegaConf.structured(MuonConfig(**options))
    cfg.lr = [lr]
    return optim.OPTIMIZER_REGISTRY[name](cfg, parameters)


def set_gradients(parameters, update):
    generator = torch.Generator().manual_seed(100 + update)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_one_matrix_is_updated_as_torch_s_muon_does(shape, monkeypatch):
    ours, theirs = parameters_of([shape], {}), parameters_of([shape], {})
    optimizer = optimizer_of(ours, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)  # it iterates in bf16
    for update in range(3):
        for parameters, each in ((ours, optimizer), (theirs, reference)):
            set_gradients(parameters, update)
            each.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-5)


def test_a_stack_is_updated_as_its_matrices_are_one_by_one_and_in_batches_of_any_size(monkeypatch):
    stack = parameters_of([(3, 6, 4)], {})
    singles = [torch.nn.Parameter(each.clone()) for each in stack[0].detach()]
    set_gradients(stack, 0)
    for single, grad in zip(singles, stack[0].grad, strict=True):
        single.grad = grad.clone()
    optimizer_of(stack).step()
    monkeypatch.setattr(muon, "MOST_AT_ONCE", 30)
    optimizer_of(singles).step()
    torch.testing.assert_close(stack[0], torch.stack(singles))


def test_singular_values_become_about_one_whatever_they_were():
    matrices = (
        torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(1)) * torch.tensor([1e-4, 1, 1e4])[:, None, None]
    )
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert values.min() > 0.6 and values.max() < 1.3


def test_what_is_no_matrix_or_is_marked_takes_adam_at_its_own_rate():
    ours, theirs = parameters_of(), parameters_of()
    optimizer = optimizer_of(ours, lr=0.02, adam_lr_factor=0.5, embedding_lr_factor=4.0)
    groups = [{"params": [theirs[3], theirs[5]], "lr": 0.01}, {"params": [theirs[4]], "lr": 0.04}]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-10, weight_decay=0.0)
    for update in range(3):
        for parameters, each in ((ours, optimizer), (theirs, reference)):
            set_gradients(parameters, update)
            each.step()
    for index in (3, 4, 5):
        torch.testing.assert_close(ours[index], theirs[index])


def test_embeddings_have_their_multiple_of_the_rate_under_fused_adam_too_after_a_schedule_has_set_it():
    ours, theirs = parameters_of(), parameters_of()
    optimizer = optimizer_of(ours, name="fused_adam", embedding_lr_factor=4.0)
    optimizer.set_lr(0.01)
    groups = [{"params": [each for each in theirs if each is not theirs[4]], "lr": 0.01}]
    reference = torch.optim.AdamW(
        [*groups, {"params": [theirs[4]], "lr": 0.04}], betas=(0.9, 0.99), eps=1e-10, weight_decay=0
    )
    for parameters, each in ((ours, optimizer), (theirs, reference)):
        set_gradients(parameters, 0)
        each.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["muon", "fused_adam"])
def test_it_resumes_to_the_last_bit_and_numbers_its_state_in_the_model_s_order(name):
    def trained(resume_at):
        parameters = parameters_of()
        optimizer = optimizer_of(parameters, name=name)
        for update in range(6):
            if update == resume_at:
                state = optimizer.state_dict()
                assert [sorted(state["state"]), state["param_groups"][0]["params"]] == [[*range(6)]] * 2
                for number, parameter in enumerate(parameters):
                    moments = [each for each in state["state"][number].values() if each.dim()]
                    assert moments and all(each.shape == parameter.shape for each in moments)
                optimizer = optimizer_of(parameters, name=name)
                optimizer.load_state_dict(state)
            set_gradients(parameters, update)
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in parameters])

    assert torch.equal(trained(None), trained(3))


def test_a_norm_is_clipped_over_all_parameters():
    parameters = parameters_of()
    set_gradients(parameters, 0)
    before = torch.cat([each.grad.flatten() for each in parameters])
    norm = optimizer_of(parameters).clip_grad_norm(1.0)
    torch.testing.assert_close(norm, before.norm())
    torch.testing.assert_close(torch.cat([each.grad.flatten() for each in parameters]), before / before.norm())
