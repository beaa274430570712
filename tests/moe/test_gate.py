"""Both gates, against each other and against loops that walk down the tree token by token."""

import math

import pytest
import torch

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.images.mixtures import ParallelGate
from fairseq_alma.images.networks import init_as_linear
from fairseq_alma.moe import DescendingGate

FEATURES, BATCH = 6, 40
TREES = [
    [0], [0, 1, 2], [0, 1, [2, 4], 3], [[0, [3, 5]], [1, [2, [4, 6]]]], [[[[[[0, 6], 5], 4], 3], 2], 1],
    [[0], [1, 2, 3, 4]],
]  # fmt: skip


def gate_of(nested, seed=1):
    gate = ParallelGate(FEATURES, GateTree.from_nested(nested))
    init_as_linear(gate.weight, gate.bias, torch.Generator().manual_seed(seed))
    return gate


def features(seed=2):
    return 3 * torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(seed))


def walk(nested, position, path, gate, image):
    """Yield each expert below a node, its probability, and whether it is on the best path.

    The dictionary of the tree gives the row of each path: the test shares no row arithmetic with the layer.
    """
    rows = gate.tree.paths()
    own = [rows[(*path, child)] for child in range(len(nested))]
    logits = [float(gate.weight[row] @ image + gate.bias[row]) for row in own]
    total = sum(math.exp(logit) for logit in logits)
    best = logits.index(max(logits))
    for child, (below, logit) in enumerate(zip(nested, logits, strict=True)):
        prob, is_best = position[0] * math.exp(logit) / total, position[1] and child == best
        if isinstance(below, list):
            yield from walk(below, (prob, is_best), (*path, child), gate, image)
        else:
            yield below, prob, is_best


@pytest.mark.parametrize("nested", TREES, ids=str)
@torch.no_grad()
def test_probabilities_and_the_best_path_are_those_of_a_walk_down_the_tree(nested):
    gate, x = gate_of(nested), features()
    routing = gate(x)
    assert routing.probs.shape == (BATCH, gate.tree.num_experts)
    torch.testing.assert_close(routing.probs.sum(dim=1), torch.ones(BATCH))
    for image, probs, expert in zip(x, routing.probs, routing.expert, strict=True):
        walked = list(walk(nested, (1.0, True), (), gate, image))
        for one, prob, is_best in walked:
            assert probs[one].item() == pytest.approx(prob, rel=1e-4, abs=1e-7)
            assert is_best == (one == expert)
        assert len(walked) == gate.tree.num_experts


def test_the_best_path_need_not_lead_to_the_expert_of_largest_probability():
    gate = gate_of([0, [1, 2]])
    gate.weight.data.zero_()
    gate.bias.data.copy_(torch.tensor([0.0, 0.1, 0.0, 0.0]))  # the pair has more than half, each of the two less
    routing = gate(features())
    assert set(routing.probs.argmax(dim=1).tolist()) == {0}
    assert set(routing.expert.tolist()) == {1}


@pytest.mark.parametrize("nested", TREES, ids=str)
def test_a_gradient_reaches_every_row_of_every_choice_with_more_than_one_child(nested):
    gate = gate_of(nested)
    rewards = torch.randn(gate.tree.num_experts, generator=torch.Generator().manual_seed(3))
    (gate(features()).probs @ rewards).sum().backward()
    for node in gate.tree.nodes:
        moves = gate.weight.grad[node.start : node.stop].abs().sum(dim=1) > 0
        assert moves.all() if node.stop - node.start > 1 else not moves.any()


@pytest.mark.parametrize("nested", TREES, ids=str)
@torch.no_grad()
def test_a_split_shares_the_probability_of_the_expert_and_changes_no_other(nested):
    x = features()
    for expert in range(GateTree.from_nested(nested).num_experts):
        gate = gate_of(nested)
        before, new = gate(x), gate.tree.num_experts
        gate.grow(expert, torch.Generator().manual_seed(7))
        after = gate(x)
        others = [other for other in range(new) if other != expert]
        torch.testing.assert_close(after.probs[:, others], before.probs[:, others])
        torch.testing.assert_close(after.probs[:, expert] + after.probs[:, new], before.probs[:, expert])
        assert torch.equal(torch.where(after.expert == new, expert, after.expert), before.expert)


def test_new_rows_depend_on_the_generator_old_rows_stay_and_the_state_is_weight_and_bias():
    first, same, other = gate_of([0, 1, 2]), gate_of([0, 1, 2]), gate_of([0, 1, 2])
    old = first.weight.detach().clone()
    for gate, seed in ((first, 1), (same, 1), (other, 2)):
        gate.grow(1, torch.Generator().manual_seed(seed))
    assert torch.equal(first.weight, same.weight) and not torch.equal(first.weight, other.weight)
    assert first.state_dict().keys() == {"weight", "bias"}
    rows = first.tree.paths()
    assert torch.equal(first.weight[[rows[(child,)] for child in range(3)]], old)
    assert first.weight[[rows[(1, 0)], rows[(1, 1)]]].abs().min() > 0


@pytest.mark.parametrize("nested", TREES, ids=str)
def test_both_gates_have_the_same_routing_and_gradients(nested):
    parallel = gate_of(nested)
    descending = DescendingGate(FEATURES, parallel.tree)
    descending.weight.data.copy_(parallel.weight.data)
    parallel.bias.data.zero_()
    at_once, one_by_one = parallel(features()), descending(features())
    assert torch.equal(at_once.expert, one_by_one.expert)
    torch.testing.assert_close(at_once.probs, one_by_one.probs)
    rewards = torch.randn(BATCH, parallel.tree.num_experts, generator=torch.Generator().manual_seed(3))
    for routing in (at_once, one_by_one):
        (routing.probs * rewards).sum().backward()
    torch.testing.assert_close(parallel.weight.grad, descending.weight.grad, rtol=1e-4, atol=1e-5)


def test_the_gate_computes_in_fp32_at_any_precision_of_the_model():
    gate = DescendingGate(8, GateTree.flat(4)).bfloat16()
    routing = gate(torch.randn(10, 8).bfloat16())
    assert routing.probs.dtype == routing.combine_weights.dtype == torch.float32
    x = torch.randn(10, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        probs = gate(x).probs
    torch.testing.assert_close(probs, torch.softmax(x @ gate.weight.float().t(), -1), rtol=1e-6, atol=1e-7)


def test_a_tree_descends_to_the_best_child_weighs_by_the_root_and_has_a_gradient_at_every_choice():
    torch.manual_seed(0)
    gate = DescendingGate(8, GateTree.from_nested([0, [1, [2, 4]], 3]))
    x = torch.randn(200, 8)
    routing = gate(x)
    logits = x @ gate.weight.t()
    root = torch.softmax(logits[:, :3], -1)
    below = torch.where(logits[:, 3] > logits[:, 4], 1, torch.where(logits[:, 5] > logits[:, 6], 2, 4))
    best = root.argmax(-1)
    assert torch.equal(routing.expert, torch.where(best == 1, below, torch.tensor([0, -1, 3])[best]))
    torch.testing.assert_close(routing.combine_weights, root.max(-1).values)
    assert set(routing.expert.tolist()) == {0, 1, 2, 3, 4}
    (routing.combine_weights * torch.randn(200)).sum().backward()
    assert (gate.weight.grad.abs().sum(1) > 0).all()
