import pytest
import torch

from fairseq_alma.checkpoints.model_options import GrowOptions
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.growth.tensors import (
    GATE_TENSOR,
    gather_slices,
    grow_mixture,
    grow_optimizer_state,
    grow_tensor,
    select_experts,
)
from fairseq_alma.moe import SwitchLayer
from fairseq_alma.text.grow import grow_experts


def layer_of(tree, seed=0):
    torch.manual_seed(seed)
    layer = SwitchLayer(8, 16, tree).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def grown_layer(layer, growth, noise=0.0):
    generator = torch.Generator().manual_seed(1)
    grown = SwitchLayer(8, 16, growth.new).eval()
    old = layer.state_dict()
    grown.load_state_dict({name: grow_tensor(name, old[name], growth, generator, noise) for name in old})
    return grown


@pytest.mark.parametrize("nested", [[0, 1, 2], [[0, 1], 2], [0, [1, [2, 3]]]])
def test_repeated_splits_keep_the_output(nested):
    layer = layer_of(GateTree.from_nested(nested))
    x = torch.randn(300, 8)
    want = layer(x)[0]
    for parents in ([1], [1, 0], [1, 2]):
        layer = grown_layer(layer, grow_mixture(layer.gate.tree, "split", parents))
        torch.testing.assert_close(layer(x)[0], want)


def test_both_halves_of_a_split_expert_get_tokens_and_the_new_gate_a_gradient():
    layer = grown_layer(layer_of(GateTree.flat(2)), grow_mixture(GateTree.flat(2), "split", [0])).train()
    output, _, stats = layer(torch.randn(300, 8))
    output.square().sum().backward()
    assert (layer.gate.weight.grad[2:].abs().sum(1) > 0).all()
    assert min(stats.routed) > 0


def test_a_copy_has_the_weights_and_gate_row_of_its_parent_and_the_tree_stays_flat():
    layer = layer_of(GateTree.flat(3))
    growth = grow_mixture(GateTree.flat(3), "copy", [2, 0])
    grown = grown_layer(layer, growth)
    assert growth.new.is_flat
    torch.testing.assert_close(grown.gate.weight, layer.gate.weight[[0, 1, 2, 2, 0]])
    torch.testing.assert_close(grown.experts.fc2_weight, layer.experts.fc2_weight[[0, 1, 2, 2, 0]])


def test_noise_changes_only_copied_rows():
    layer = layer_of(GateTree.flat(3))
    grown = grown_layer(layer, grow_mixture(GateTree.flat(3), "copy", [1]), noise=0.1)
    torch.testing.assert_close(grown.gate.weight[:3], layer.gate.weight)
    assert 0.02 < (grown.gate.weight[3] - layer.gate.weight[1]).abs().mean() < 0.3
    scratch = grow_mixture(GateTree.flat(3), "scratch", [None] * 2)
    assert torch.equal(grown_layer(layer, scratch, noise=0.1).gate.weight, grown_layer(layer, scratch).gate.weight)


def test_new_experts_from_scratch_do_not_change_old_experts():
    layer = layer_of(GateTree.flat(3))
    grown = grown_layer(layer, grow_mixture(GateTree.flat(3), "scratch", [None] * 4))
    assert grown.experts.num_experts == 7
    torch.testing.assert_close(grown.experts.fc1_weight[:3], layer.experts.fc1_weight)
    torch.testing.assert_close(grown.gate.weight[:3], layer.gate.weight)
    assert not grown.experts.fc1_bias[3:].any()


def test_new_gated_experts_from_scratch_have_the_weights_of_a_new_model():
    made = torch.ones(1, 40, 90), grow_mixture(GateTree.flat(1), "scratch", [None]), torch.Generator().manual_seed(1)
    up, down = (grow_tensor(f"experts.{kind}_proj", *made) for kind in ("up", "down"))
    assert up[1].var().item() == pytest.approx(1 / 90, rel=0.1) and not down[1].any()


def test_methods_can_be_combined():
    tree = GateTree.flat(2)
    for method, parents in (("split", [1]), ("copy", [1, 2]), ("scratch", [None]), ("split", [5])):
        tree = grow_mixture(tree, method, parents).new
    assert tree.to_nested() == [0, [1, 2, 3, 4], [5, 6]]


def test_experts_with_the_largest_score_are_selected_and_ties_by_number():
    losses, counts = [1.0, 5.0, 5.0, 0.0], [9, 1, 2, 0]
    generator = torch.Generator().manual_seed(0)
    assert select_experts(losses, counts, 2, "loss", generator) == [1, 2]
    assert select_experts(losses, counts, 2, "usage", generator) == [0, 2]
    assert sorted(select_experts(losses, counts, 4, "random", generator)) == [0, 1, 2, 3]


def test_moments_of_copies_are_copied_and_moments_of_new_gates_are_zero():
    layer = layer_of(GateTree.flat(2))
    growth = grow_mixture(GateTree.flat(2), "split", [1])
    moments = {name: torch.randn_like(parameter) for name, parameter in layer.named_parameters()}
    entries = {index: {"step": 7, "exp_avg": moment} for index, moment in enumerate(moments.values())}
    checkpoint = {
        "model": {f"switch.{name}": parameter.detach() for name, parameter in layer.named_parameters()},
        "cfg": {"model": {"num_experts": 2, "gate_trees": ""}},
        "last_optimizer_state": {"state": entries, "param_groups": [{"lr": 0.1, "params": [*range(len(entries))]}]},
    }
    args = GrowOptions(path="", out="", optimizer="copy")
    grown = grow_experts(checkpoint, {"switch": growth}, [*checkpoint["model"]], args, {})
    for (name, old), entry in zip(moments.items(), grown["last_optimizer_state"]["state"].values(), strict=True):
        wanted = torch.cat([old, torch.zeros(2, 8)]) if name == GATE_TENSOR else old[[0, 1, 1]]
        assert torch.equal(entry["exp_avg"], wanted) and entry["step"] == 7
    assert grown["cfg"]["model"] == {"num_experts": 3, "gate_trees": "[[0,[1,2]]]"}


@pytest.mark.parametrize(
    ("field", "params", "message"),
    [("exp_avg", 2, "the 3 parameters of the model, found 2"), ("exp_avg_sq_row", 3, "Muon, found exp_avg_sq_row;")],
)
def test_an_optimizer_state_of_another_model_or_kind_is_rejected(field, params, message):
    state = {"state": {0: {field: torch.zeros(3)}}, "param_groups": [{"params": [*range(params)]}]}
    with pytest.raises(AlmaError, match=message):
        grow_optimizer_state(state, "abc", "abc", lambda name, entry: dict(entry))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_are_gathered_from_their_sources(dtype):
    old = torch.randn(3, 2).to(dtype)
    grown = gather_slices(old, (2, None, 0, 2, None), lambda position: torch.full((2,), float(position)))
    assert grown.dtype == dtype
    assert torch.equal(grown, torch.stack([old[2], torch.ones(2), old[0], old[2], torch.full((2,), 4.0)]).to(dtype))
