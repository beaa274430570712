import pytest
import torch

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.images.mixtures import MixtureVGG
from fairseq_alma.images.networks import MLP, NUM_CONVOLUTIONS, VGG, MemberBatchNorm2d, SideBySide, measure_batch_norm
from fairseq_alma.training.feature import Part, Setting
from fairseq_alma.training.stage_ends import StageEnds, share_of_new


def test_the_mean_over_stages_is_that_of_all_their_ends_and_no_view_of_them():
    model, ends, checkpoint = torch.nn.Linear(5, 4), [], {}
    for stage in range(6):
        torch.nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(stage))
        ends.append(model.weight.detach().clone())
        feature = StageEnds(stage_average="mean").for_part(Part(stage=stage))
        feature.begin(checkpoint, Setting())
        average = {name: tensor.clone() for name, tensor in model.state_dict().items()} | {**feature.to_test(model)}
        checkpoint = {"model": model.state_dict(), "average": average}
    model.weight.data.zero_()
    torch.testing.assert_close(average["weight"], torch.stack(ends).mean(dim=0))


@pytest.mark.parametrize("half_life", ["1/32", "1/8"])
def test_what_an_average_is_made_of_is_half_forgotten_after_its_half_life(half_life):
    kept, stage = 1.0, 800
    while kept > 0.5:
        stage += 1
        kept *= 1 - share_of_new(stage, half_life)
    numerator, denominator = map(int, half_life.split("/"))
    assert stage / 800 == pytest.approx(1 + numerator / denominator, rel=0.01)


def test_batch_norm_is_measured_anew_as_the_mean_over_batches():
    network = VGG((1, 32, 32), 4, [3] * 16, num_members=2)
    network.reset_parameters([torch.Generator().manual_seed(seed) for seed in (1, 2)])
    images = torch.randn(12, 1, 32, 32, generator=torch.Generator().manual_seed(4))
    before = {name: parameter.clone() for name, parameter in network.named_parameters()}
    assert measure_batch_norm(network, images.split(4)) == 12
    norm = next(module for module in network.modules() if isinstance(module, MemberBatchNorm2d))
    measured = norm.running_mean.flatten().clone(), norm.running_var.flatten().clone()
    seen = []
    hook = norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        network.train()
        for batch in images.split(4):
            network(batch)
    hook.remove()
    means = torch.stack([each.mean(dim=(0, 2, 3)) for each in seen]).mean(dim=0)
    variances = torch.stack([each.var(dim=(0, 2, 3)) for each in seen]).mean(dim=0)
    torch.testing.assert_close(measured, (means, variances))
    assert all(torch.equal(before[name], parameter) for name, parameter in network.named_parameters())


@pytest.mark.parametrize("gate", ["soft", "hard"])
@pytest.mark.parametrize("num_members", [1, 2])
def test_batch_norm_of_mixtures_is_measured_alone_and_side_by_side(gate, num_members):
    trees = [GateTree.flat(2)] * NUM_CONVOLUTIONS
    networks = [MixtureVGG((1, 16, 16), 4, 2, trees, gate) for _ in range(num_members)]
    for network in networks:
        network.reset_parameters([torch.Generator().manual_seed(1)])
    network = networks[0] if num_members == 1 else SideBySide(networks)
    images = torch.randn(12, 1, 16, 16, generator=torch.Generator().manual_seed(4))
    assert measure_batch_norm(network, images.split(4)) == 12
    norms = [module for module in network.modules() if isinstance(module, MemberBatchNorm2d)]
    assert len(norms) == NUM_CONVOLUTIONS * num_members
    assert all(norm.running_mean.abs().sum() > 0 for norm in norms)


def test_a_network_without_batch_norm_is_left_alone():
    network = MLP((1, 2, 2), 2, 3)
    assert measure_batch_norm(network, [torch.zeros(2, 1, 2, 2)]) == 0
