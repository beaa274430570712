"""More layers: what an optimizer remembers of them, by itself or in one vector."""

import torch

from fairseq_alma.growth.sizes import grow_depth
from fairseq_alma.growth.tensors import enlarge_optimizer_state

NAMES = (
    "embed.weight",
    *(f"decoder.layers.{layer}.{part}" for layer in range(2) for part in ("fc1.weight", "fc2.bias")),
)


def test_one_vector_of_moments_grows_as_those_of_each_parameter_do():
    shapes = {name: torch.Size([2, 3] if name.endswith("weight") else [3]) for name in NAMES}
    depth = grow_depth(2, 4, every=1, method="interpolated", factor=2.0)
    new_shapes = {
        "embed.weight": shapes["embed.weight"],
        **{f"decoder.layers.{layer}.fc1.weight": torch.Size([2, 3]) for layer in range(4)},
        **{f"decoder.layers.{layer}.fc2.bias": torch.Size([3]) for layer in range(4)},
    }
    moments = {
        name: {"step": 7, "exp_avg": torch.rand(shape), "exp_avg_sq": torch.rand(shape)}
        for name, shape in shapes.items()
    }
    each = enlarge_optimizer_state({"state": dict(enumerate(moments.values()))}, shapes, new_shapes, depth)["state"]
    flat = {field: torch.cat([one[field].flatten() for one in moments.values()]) for field in ("exp_avg", "exp_avg_sq")}
    whole = enlarge_optimizer_state({"state": {0: {"step": 7, **flat}}}, shapes, new_shapes, depth)["state"]
    for field in flat:
        assert torch.equal(whole[0][field], torch.cat([one[field].flatten() for one in each.values()]))
        by_name = {name: each[number][field] for number, name in enumerate(new_shapes)}
        assert torch.equal(by_name["decoder.layers.2.fc1.weight"], moments["decoder.layers.1.fc1.weight"][field])
        assert not by_name["decoder.layers.1.fc1.weight"].any()
    assert torch.equal(each[5]["exp_avg"], moments["decoder.layers.0.fc2.bias"]["exp_avg"] / 2)
    assert whole[0]["step"] == each[0]["step"] == 7
