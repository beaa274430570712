"""A model and its average have the same outputs after growth by layers, by a split of experts, or by both."""

import pytest
import torch

from fairseq_alma.checkpoints import AVERAGE, TASK_STATE
from fairseq_alma.checkpoints.checkpoint_file import with_shared_names, write_average
from fairseq_alma.checkpoints.model_options import GrowOptions
from fairseq_alma.errors import AlmaError
from fairseq_alma.text.grow import RECORD_KEY, grow
from fairseq_alma.text.transformer_lm import build_from_config
from tests.models.ensembles import switch_config
from tests.text.models import transformer_config

NUM_TOKENS = 46
SPLIT = {"method": "split", "experts": 2, "select": "random"}
MODELS = {
    "switch": switch_config,
    "switch trees": lambda: switch_config(num_experts=3, gate_trees="[[0,[1,2]],[0,1,2]]"),
    "switch sinusoidal": lambda: switch_config(decoder_sinusoidal_pos=True),
    "transformer": lambda: transformer_config(num_experts=4, decoder_layers=4),
    "transformer trees": lambda: transformer_config(num_experts=3, decoder_layers=4, gate_trees="[[0,[1,2]],[0,1,2]]"),
}
DENSE = {
    "switch": lambda: switch_config(moe_freq=0),
    "one expert": lambda: switch_config(num_experts=1),
    "transformer": lambda: transformer_config(decoder_layers=4),
    "every third": lambda: transformer_config(decoder_layers=4, moe_freq=3),
}
MIXTURE = {"method": "split", "experts": 3}


def checkpoint_of(path, config, moments=("exp_avg", "exp_avg_sq")):
    """Write a checkpoint without zero weights and with an optimizer state; return its model."""
    torch.manual_seed(1)
    model = build_from_config(config, NUM_TOKENS + 4, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    entries = [{"step": 7, **{name: torch.rand_like(each) for name in moments}} for each in model.parameters()]
    state = {"state": dict(enumerate(entries)), "param_groups": [{"params": [*range(len(entries))]}]}
    average = {name: parameter.detach() + 0.01 for name, parameter in model.named_parameters()}
    extra = {TASK_STATE: {"train_tokens": 5, "first_update": 0, AVERAGE: average}}
    checkpoint = {"model": model.state_dict(), "cfg": {"model": config}, "last_optimizer_state": state}
    torch.save({**checkpoint, "extra_state": extra}, path)
    return model.eval()


def grown_of(folder, **options):
    """Grow the checkpoint in a folder; return the printed text, the checkpoint and its model."""
    printed = grow(GrowOptions(path=str(folder / "old.pt"), out=str(folder / "new.pt"), cpu=True, **options))
    checkpoint = torch.load(folder / "new.pt", weights_only=True)
    return printed, checkpoint, loaded(checkpoint, checkpoint["model"])


def loaded(checkpoint, weights):
    model = build_from_config(checkpoint["cfg"]["model"], NUM_TOKENS + 4, "cpu")
    model.load_state_dict(weights, strict=True)
    return model.eval()


def output(model):
    tokens = torch.randint(4, NUM_TOKENS, (3, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return model(tokens)[0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{"layers": 6}, SPLIT, {"layers": 7, **SPLIT}], ids=["layers", "split", "both"])
def test_growth_keeps_the_outputs_of_a_model_and_of_its_average(tmp_path, name, options):
    old = checkpoint_of(tmp_path / "old.pt", MODELS[name]())
    before = torch.load(tmp_path / "old.pt")
    _, grown, new = grown_of(tmp_path, **options)
    assert sum(p.numel() for p in new.parameters()) > sum(p.numel() for p in old.parameters())
    torch.testing.assert_close(output(new), output(old))
    averaged = with_shared_names(before["model"], before["extra_state"][TASK_STATE][AVERAGE])
    write_average(tmp_path / "new.pt", tmp_path / "average.pt")
    written = torch.load(tmp_path / "average.pt", weights_only=True)["model"]
    torch.testing.assert_close(output(loaded(grown, written)), output(loaded(before, averaged)))


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("switch", {"layers": 5}, {"decoder_layers": 5}),
        ("transformer", {"layers": 5}, {"decoder_layers": 5}),
        ("transformer", {**MIXTURE, "moe_freq": 1}, {"num_experts": 4, "moe_freq": 1}),
        ("every third", MIXTURE, {"num_experts": 4, "moe_freq": 3}),
    ],
)
def test_a_dense_model_grows_by_layers_or_by_splits_into_a_mixture(tmp_path, name, options, sizes):
    old = checkpoint_of(tmp_path / "old.pt", DENSE[name]())
    _, checkpoint, new = grown_of(tmp_path, **options)
    assert checkpoint["cfg"]["model"].items() >= sizes.items()
    torch.testing.assert_close(output(new), output(old))


@pytest.mark.parametrize(("name", "moments"), [("switch", ("exp_avg", "exp_avg_sq")), ("transformer", ("momentum",))])
def test_old_parameters_keep_their_moments_and_new_ones_have_none(tmp_path, name, moments):
    old = checkpoint_of(tmp_path / "old.pt", MODELS[name](), moments)
    state = torch.load(tmp_path / "old.pt")["last_optimizer_state"]["state"]
    printed, checkpoint, new = grown_of(tmp_path, layers=6, **SPLIT, optimizer="copy")
    given, read = printed.split("fairseq-train reads these options from the checkpoint")
    assert "--decoder-layers 6" in (given if name == "switch" else read)
    assert checkpoint[RECORD_KEY][0]["depth"] == {"old": 4, "new": 6}
    known = {name: state[number] for number, (name, _) in enumerate(old.named_parameters())}
    shapes = {name: parameter.shape for name, parameter in new.named_parameters()}
    grown = checkpoint["last_optimizer_state"]
    assert grown["param_groups"][0]["params"] == [*range(len(shapes))]
    found = {[*shapes][number]: entry for number, entry in grown["state"].items()}
    assert found.keys() == known.keys() < shapes.keys()
    for name, entry in found.items():
        assert entry.keys() == known[name].keys() and entry["step"] == 7
        for moment in moments:
            assert entry[moment].shape == shapes[name]
            assert torch.equal(entry[moment][: len(known[name][moment])], known[name][moment])


@pytest.mark.parametrize("method", ["split", "copy"])
def test_experts_made_of_a_dense_transformer_keep_its_moments_and_gates_have_none(tmp_path, method):
    old = checkpoint_of(tmp_path / "old.pt", DENSE["transformer"](), ("momentum",))
    state = torch.load(tmp_path / "old.pt")["last_optimizer_state"]["state"]
    known = {name: state[number]["momentum"] for number, (name, _) in enumerate(old.named_parameters())}
    _, checkpoint, new = grown_of(tmp_path, method=method, experts=1, optimizer="copy")
    grown = checkpoint["last_optimizer_state"]["state"]
    for number, (name, parameter) in enumerate(new.named_parameters()):
        if name.endswith("mlp.gate.weight"):
            assert number not in grown
            continue
        is_expert = ".experts." in name
        before = known[f"{name.replace('.experts', '')}.weight" if is_expert else name]
        assert torch.equal(grown[number]["momentum"], torch.stack([before] * 2) if is_expert else before)
        assert grown[number]["momentum"].shape == parameter.shape
    with pytest.raises(AlmaError, match="has no experts to measure or select; omit --select"):
        grown_of(tmp_path, method="copy", experts=1, select="usage")


@pytest.mark.parametrize(("name", "options"), [("transformer", {"seed": 7}), ("one expert", {})])
def test_copies_of_a_dense_model_nearly_keep_the_output(tmp_path, name, options):
    old = checkpoint_of(tmp_path / "old.pt", DENSE[name]())
    _, checkpoint, new = grown_of(tmp_path, method="copy", experts=3, **options)
    assert checkpoint["cfg"]["model"]["gate_trees"] == ""
    assert (output(new) - output(old)).norm() < 0.05 * output(old).norm()
    routed = new(torch.arange(4, NUM_TOKENS).view(2, -1))[1]["switch"]
    assert all(min(each.routed) > 0 for each in routed)  # each copy gets tokens
    with pytest.raises(AlmaError, match="--optimizer share: a dense layer is split into 4 experts, not in halves"):
        grown_of(tmp_path, method="split", experts=3, optimizer="share", **options)
