"""Layers, widths and experts, alone and together: a model computes after growth what it did before, and goes on."""

import pytest
import torch

from fairseq_alma.checkpoints import AVERAGE, TASK_STATE
from fairseq_alma.checkpoints.checkpoint_file import with_shared_names
from fairseq_alma.checkpoints.checkpoint_growth import RECORD_KEY
from fairseq_alma.checkpoints.model_options import GrowOptions
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth import sizes
from fairseq_alma.text.grow import grow
from fairseq_alma.text.model import build_from_config
from fairseq_alma.training.average import averaged_model
from tests.text.switch_models import config_of, model_of

NUM_TOKENS = 46
TREES = {"num_experts": 3, "gate_trees": "[[0,[1,2]],[0,1,2]]"}
MODELS = {
    "switch": {},
    "trees": TREES,
    "mup": {"mup": True},
    "sinusoidal": {"decoder_sinusoidal_pos": True},
    "unscaled": {"no_scale_embedding": True, "activation_fn": "gelu"},
    "dense": {"moe_freq": 0},
}
GROWTHS = {
    "embed": {"embed_dim": 32},
    "three-times": {"embed_dim": 48},
    "ffn": {"ffn_dim": 80},
    "both": {"embed_dim": 32, "ffn_dim": 48},
    "layers": {"embed_dim": 32, "layers": 6},
    "experts": {"embed_dim": 32, "ffn_dim": 64, "experts": 2, "method": "split", "select": "random"},
    "all": {"embed_dim": 32, "ffn_dim": 64, "layers": 6, "experts": 2, "method": "split", "select": "random"},
}


def checkpoint_of(path, **options):
    """Write a checkpoint of a small model none of whose weights are zero, with moments of Adam's. Returns its model."""
    model = model_of(NUM_TOKENS, **options)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    entries = [{"step": 7, "exp_avg": each, "exp_avg_sq": each**2} for each in gradients_of(model)]
    config = {**vars(config_of(**options)), "_name": "alma_switch_lm"}
    state = {"state": dict(enumerate(entries)), "param_groups": [{"params": [*range(len(entries))]}]}
    torch.save({"model": model.state_dict(), "cfg": {"model": config}, "last_optimizer_state": state}, path)
    return model.eval()


def gradients_of(model):
    """Return the gradients of what any output moves, in the order of the parameters."""
    model.eval()
    loss = torch.tanh(model(tokens())[0]).square().sum()
    return torch.autograd.grad(loss, [*model.parameters()])


def tokens():
    return torch.randint(4, NUM_TOKENS, (3, 20), generator=torch.Generator().manual_seed(2))


def is_close(found, wanted, share):
    return (found - wanted).abs().max() <= share * wanted.abs().max()


def grown_of(folder, **options):
    """Grow the checkpoint in a folder. Returns what is printed, the checkpoint and its model."""
    said = grow(GrowOptions(path=str(folder / "old.pt"), out=str(folder / "new.pt"), cpu=True, **options))
    checkpoint = torch.load(folder / "new.pt", weights_only=True)
    model = build_from_config(checkpoint["cfg"]["model"], NUM_TOKENS + 4, "cpu")
    model.load_state_dict(checkpoint["model"], strict=True)
    return said, checkpoint, model.eval()


CASES = [
    pytest.param(name, what, marks=() if name == "switch" or what in ("both", "all") else pytest.mark.slow)
    for name in MODELS
    for what in GROWTHS
    if name != "dense" or "experts" not in GROWTHS[what]
]


@pytest.mark.parametrize(("name", "what"), CASES)
def test_no_growth_in_size_changes_what_a_model_computes(tmp_path, name, what):
    old = checkpoint_of(tmp_path / "old.pt", **MODELS[name])
    _, _, new = grown_of(tmp_path, **GROWTHS[what])
    assert sum(p.numel() for p in new.parameters()) > sum(p.numel() for p in old.parameters())
    with torch.no_grad():
        before, after = (model(tokens())[0] for model in (old, new))
    assert is_close(after, before, 1e-4)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        short_before, short_after = (model(tokens())[0].float() for model in (old, new))
    rounding = (short_before - before).abs().mean()  # what bf16 alone does to the model; a token may get another expert
    assert (short_after - short_before).abs().mean() < 2 * rounding


@pytest.mark.parametrize("name", ["switch", "mup", "unscaled"])
def test_the_moments_of_a_wider_model_are_those_of_its_own_gradients(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sizes, "SPREAD", 0.0)  # what parts have in common; moments take them as even
    checkpoint_of(tmp_path / "old.pt", **MODELS[name])
    _, checkpoint, new = grown_of(tmp_path, embed_dim=48, ffn_dim=80, optimizer="copy")
    entries = checkpoint["last_optimizer_state"]["state"]
    for (name, _), entry, gradient in zip(new.named_parameters(), entries.values(), gradients_of(new), strict=True):
        assert is_close(entry["exp_avg"], gradient, 1e-3), name
        assert is_close(entry["exp_avg_sq"], gradient**2, 1e-3), name


def test_copies_get_different_gradients_so_that_they_do_not_stay_copies(tmp_path):
    checkpoint_of(tmp_path / "old.pt")
    _, _, new = grown_of(tmp_path, embed_dim=32, ffn_dim=64)
    for (name, parameter), gradient in zip(new.named_parameters(), gradients_of(new), strict=True):
        if "fc1" in name or "v_proj" in name or name.endswith("fc2.weight"):
            first, second = gradient.chunk(2, -1 if name.endswith("bias") else -2)
            assert not torch.allclose(first, second, rtol=1e-2), name
            assert parameter.abs().min() > 0


def test_an_average_grows_with_the_weights(tmp_path):
    old = checkpoint_of(tmp_path / "old.pt")
    checkpoint = torch.load(tmp_path / "old.pt")
    average = {name: parameter.detach() + 0.01 for name, parameter in old.named_parameters()}
    checkpoint["extra_state"] = {TASK_STATE: {"train_tokens": 5, "first_update": 0, AVERAGE: average}}
    torch.save(checkpoint, tmp_path / "old.pt")
    old.load_state_dict(with_shared_names(old.state_dict(), average))
    _, grown, new = grown_of(tmp_path, embed_dim=32, layers=6)
    new.load_state_dict(averaged_model(grown, tmp_path)["model"])
    with torch.no_grad():
        assert is_close(new(tokens())[0], old(tokens())[0], 1e-4)


def test_what_is_written_says_which_sizes_training_needs(tmp_path):
    checkpoint_of(tmp_path / "old.pt")
    said, checkpoint, _ = grown_of(tmp_path, embed_dim=32, layers=6)
    sizes = "--decoder-layers 6 --decoder-embed-dim 32 --decoder-ffn-embed-dim 32 --decoder-attention-heads 4"
    assert said.endswith(f"; it needs {sizes}")
    wide, deep = checkpoint[RECORD_KEY]
    assert wide["width"] == {"embed": [16, 32], "ffn": [32, 32]} and deep["depth"]["method"] == "zero"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dim": 24}, "--embed-dim 24: the model has 16, and layer norms .*; give a multiple, such as 32"),
        ({"embed_dim": 8}, "--embed-dim 8: the model has 16"),
        ({"ffn_dim": 31}, "--ffn-dim 31: the model has 32, and a model only grows; give more"),
        ({"embed_dim": 16}, "--embed-dim 16 --ffn-dim 32: the model has them already; give more"),
    ],
)
def test_widths_that_cannot_be_are_one_line(tmp_path, options, message):
    checkpoint_of(tmp_path / "old.pt")
    with pytest.raises(AlmaError, match=message):
        grown_of(tmp_path, **options)
    assert not (tmp_path / "new.pt").exists()


def test_a_share_of_a_copy_s_units_is_drawn_anew_and_has_no_moments(tmp_path):
    checkpoint_of(tmp_path / "old.pt")
    options = {"experts": 1, "method": "copy", "select": "random", "optimizer": "copy"}
    _, plain, _ = grown_of(tmp_path, **options)
    _, renewed, model = grown_of(tmp_path, **options, renew_share=0.25, force=True)
    names = [name for name, _ in model.named_parameters()]
    for layer in (1, 3):
        rows = [
            (renewed["model"][name] != plain["model"][name]).movedim(axis, 1).flatten(2).all(-1)
            for name, axis in ((f"decoder.layers.{layer}.switch.experts.fc1_weight", 1),
                               (f"decoder.layers.{layer}.switch.experts.fc2_weight", 2))
        ]  # fmt: skip
        assert torch.equal(*rows) and rows[0].sum(1).tolist() == [0, 0, 0, 0, 8]  # a quarter of 32 units
        place = names.index(f"decoder.layers.{layer}.switch.experts.fc1_weight")
        moments = renewed["last_optimizer_state"]["state"][place]["exp_avg"]
        assert not moments[rows[0]].any() and moments[~rows[0]].any()
