"""Mixtures against a plain loop over their experts, which are layers of ``torch.nn`` here."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.images.mixtures import MixtureConv, MixtureLinear, sample_experts

TREE = [0, [1, [3, 4]], 2]
NUM_EXPERTS, INPUTS, OUTPUTS, BATCH, SIDE = 5, 6, 4, 24, 5
KINDS = [MixtureLinear, MixtureConv]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed))


def layer_of(kind, gate, nested=TREE):
    layer = kind(INPUTS, OUTPUTS, GateTree.from_nested(nested), gate)
    layer.reset_parameters([seeded(1)])
    if kind is MixtureConv:  # each expert with norms of its own, as training makes them
        for number, tensor in enumerate((layer.norm.weight, layer.norm.bias, layer.norm.running_mean)):
            tensor.data.copy_(1 + 0.3 * noise(*tensor.shape, seed=10 + number))
        layer.norm.running_var.copy_(0.5 + torch.rand(layer.norm.running_var.shape, generator=seeded(20)))
    return layer


def inputs_of(kind):
    return noise(BATCH, INPUTS, SIDE, SIDE, seed=2) + 1 if kind is MixtureConv else 2 * noise(BATCH, INPUTS, seed=2)


def experts_of(layer):
    """Return each expert as layers of torch with the mixture's weights."""
    experts = []
    for number in range(layer.num_experts):
        if isinstance(layer, MixtureLinear):
            parts, layers = [layer.linear], [nn.Linear(INPUTS, OUTPUTS)]
        else:
            parts = [layer.conv, layer.norm]
            layers = [nn.Conv2d(INPUTS, OUTPUTS, 3, padding=1, bias=False), nn.BatchNorm2d(OUTPUTS)]
        for part, expert_part in zip(parts, layers, strict=True):
            own = {name: tensor[number] for name, tensor in part.state_dict().items()}
            missing, unknown = expert_part.load_state_dict(own, strict=False)
            assert not unknown and set(missing) <= {"num_batches_tracked"}
        experts.append(nn.Sequential(*layers, nn.ReLU()).train(layer.training))
    return experts


def looped(layer, x, weights):
    """Sum over the experts, one after the other, with (B, E) weights."""
    shape = (-1, *[1] * (x.dim() - 1))
    weighted = zip(experts_of(layer), weights.unbind(1), strict=True)
    return sum(expert(x) * weight.view(shape) for expert, weight in weighted)


def probs_of(layer, x):
    return layer.gate(x.mean(dim=(2, 3)) if x.dim() == 4 else x).probs.detach()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_soft_mixture_is_the_mean_of_its_experts_weighted_by_their_probabilities(kind, training):
    layer, x = layer_of(kind, "soft").train(training), inputs_of(kind)
    torch.testing.assert_close(layer(x), looped(layer, x, probs_of(layer, x)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hard_mixture_in_training_draws_one_expert_for_each_image(kind):
    layer, x = layer_of(kind, "hard").train(), inputs_of(kind)
    drawn = sample_experts(probs_of(layer, x), seeded(5))
    expected = looped(layer, x, F.one_hot(drawn, NUM_EXPERTS).float())
    torch.testing.assert_close(layer(x, [seeded(5)]), expected, rtol=1e-4, atol=1e-5)
    assert len(drawn.unique()) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_hard_gate_gets_the_gradient_of_probabilities_and_experts_that_of_their_images(kind):
    layer, x = layer_of(kind, "hard").train(), inputs_of(kind)
    output = layer(x, [seeded(5)])
    rewards = noise(*output.shape, seed=6)
    (output * rewards).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    # Straight-through: d loss / d probability of an expert is the loss's change per unit of that expert's output.
    each = torch.stack([expert(x).detach() for expert in experts_of(layer)], dim=1)  # (B, E, ...)
    worth = (each * rewards[:, None]).flatten(2).sum(dim=2)
    (layer.gate(x.mean(dim=(2, 3)) if x.dim() == 4 else x).probs * worth).sum().backward()
    for name in ("weight", "bias"):
        torch.testing.assert_close(found[f"gate.{name}"], layer.gate.get_parameter(name).grad, rtol=1e-3, atol=1e-4)
    experts, drawn = experts_of(layer), sample_experts(probs_of(layer, x), seeded(5))
    for number, expert in enumerate(experts):
        chosen = (drawn == number).float().view(-1, *[1] * (x.dim() - 1))
        (expert(x) * chosen * rewards).sum().backward()
        first = "linear" if kind is MixtureLinear else "conv"
        torch.testing.assert_close(found[f"{first}.weight"][number], expert[0].weight.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("num_images", [1, BATCH])
@pytest.mark.parametrize("nested", [[0], TREE], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_hard_mixture_at_test_has_the_output_of_the_chosen_expert(kind, nested, num_images):
    layer, x = layer_of(kind, "hard", nested).eval(), inputs_of(kind)[:num_images]
    found = layer(x)
    every = layer.all_experts(x)
    assert every.shape[:2] == (num_images, layer.num_experts)
    torch.testing.assert_close(found, every[torch.arange(num_images), layer.routing.expert], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, looped(layer, x, layer.shares()), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_images_at_test_do_not_depend_on_their_neighbours():
    for kind in KINDS:
        for gate in ("soft", "hard"):
            layer, x = layer_of(kind, gate).eval(), inputs_of(kind)
            alone = torch.cat([layer(image[None]) for image in x])
            torch.testing.assert_close(layer(x), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gate", ["soft", "hard"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_split_keeps_the_output_at_test(kind, gate):
    layer, x = layer_of(kind, gate).eval(), inputs_of(kind)
    before = layer(x)
    for step, expert in enumerate([3, 0, NUM_EXPERTS]):
        layer.grow(expert, seeded(step))
        assert layer.num_experts == NUM_EXPERTS + step + 1
        torch.testing.assert_close(layer(x), before, rtol=1e-4, atol=1e-5)
        for module in layer.expert_modules():
            for tensor in module.state_dict().values():
                assert torch.equal(tensor[-1], tensor[expert])


@pytest.mark.parametrize("gate", ["soft", "hard"])
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_split_every_row_of_the_gate_and_both_halves_learn(kind, gate):
    layer, x = layer_of(kind, gate, [0, 1]).train(), inputs_of(kind)
    layer.grow(1, seeded(1))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(2):  # equal halves differ after the first update, and the gate between them from the second on
        optimizer.zero_grad()
        output = layer(x, [seeded(step)])
        (output * noise(*output.shape, seed=8)).sum().backward()
        optimizer.step()
    weight = (layer.linear if kind is MixtureLinear else layer.conv).weight
    assert not torch.equal(weight[1], weight[2])
    assert (layer.gate.weight.grad.abs().sum(dim=1) > 0).all()


def test_experts_are_drawn_with_their_probabilities():
    probs = torch.tensor([0.5, 0.0, 0.2, 0.3]).expand(20_000, -1)
    shares = torch.bincount(sample_experts(probs, seeded(1)), minlength=4) / 20_000
    assert shares[1] == 0
    torch.testing.assert_close(shares, probs[0], rtol=0, atol=0.016)  # 4.5 deviations


def test_probabilities_with_a_sum_below_one_draw_an_existing_expert():
    assert sample_experts(torch.full((1000, 3), 0.3), seeded(1)).max() == 2
