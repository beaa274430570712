import pytest
import torch

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.images.mixtures import MixtureMLP, grow_losing_experts, measure_expert_losses, mixture_layers
from fairseq_alma.images.stage_trainer import seeded
from tests.images.image_streams import NUM_CLASSES, make_images

SHAPE = (1, 8, 8)


def images_and_labels(num_images=60):
    images, labels = make_images(num_images, 1, SHAPE)
    return torch.from_numpy(images).float() / 100 - 1, torch.from_numpy(labels)


def network_of(gate, num_experts=3):
    network = MixtureMLP(SHAPE, NUM_CLASSES, 5, [GateTree.flat(num_experts)] * 2, gate)
    network.reset_parameters([seeded(1)])
    return network.eval()


@pytest.mark.parametrize("gate", ["soft", "hard"])
def test_the_losses_of_experts_are_those_of_the_images_routed_to_them(gate):
    network = network_of(gate)
    images, labels = images_and_labels()
    expected = [torch.zeros(3), torch.zeros(3)]
    for image, label in zip(images, labels, strict=True):
        logits = network(image[None])[0]
        loss = torch.nn.functional.cross_entropy(logits, label[None]).detach()
        for total, layer in zip(expected, mixture_layers(network), strict=True):
            probs = layer.routing.probs[0]
            if gate == "soft":
                total += loss * probs
            else:
                total[probs.argmax()] += loss
    for found, wanted in zip(measure_expert_losses(network, images, labels), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gate", ["soft", "hard"])
def test_the_expert_with_the_largest_loss_of_each_layer_is_split_and_the_loss_stays(gate):
    network = network_of(gate, num_experts=2)
    images, labels = images_and_labels()
    for step in range(4):
        network.eval()
        before = torch.nn.functional.cross_entropy(network(images)[0], labels).item()
        largest = [int(losses.argmax()) for losses in measure_expert_losses(network, images, labels)]
        assert grow_losing_experts(network, images, labels, seeded(step)) == largest
        assert torch.nn.functional.cross_entropy(network(images)[0], labels).item() == pytest.approx(before, rel=1e-6)
        assert [layer.num_experts for layer in mixture_layers(network)] == [step + 3] * 2


def test_a_copy_shares_a_flat_gate():
    network = network_of("soft")
    images, labels = images_and_labels()
    before = [(layer.gate.weight.clone(), layer.gate.bias.clone()) for layer in mixture_layers(network)]
    parents = grow_losing_experts(network, images, labels, seeded(1), "copy")
    for layer, parent, (weight, bias) in zip(mixture_layers(network), parents, before, strict=True):
        assert layer.gate.tree.is_flat
        rows = [layer.gate.tree.row_expert.index(expert) for expert in range(4)]
        assert torch.equal(layer.gate.weight[rows], torch.cat([weight, weight[parent : parent + 1]]))
        assert torch.equal(layer.gate.bias[rows], torch.cat([bias, bias[parent : parent + 1]]))
        network(images)
        probs = layer.routing.probs
        assert torch.equal(probs[:, parent], probs[:, 3])
