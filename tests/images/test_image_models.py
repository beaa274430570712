"""The image architectures: registered, built from their options, counted, and loaded again by fairseq."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models import ARCH_MODEL_REGISTRY

import fairseq_alma
from fairseq_alma.data.image_stream import ImageStream
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.images import image_models as models
from fairseq_alma.images.image_job import ImageTrainOptions
from fairseq_alma.images.mixtures import mixture_layers
from fairseq_alma.images.model_store import ImageSettings, TrainedModel, write_model
from fairseq_alma.images.networks import ImageKind, NetworkList, count_flops
from fairseq_alma.images.stage_trainer import seeded
from fairseq_alma.learners.learner import LEARNERS
from tests.images.image_streams import make_stream

fairseq_alma.register()

SHAPE, NUM_CLASSES, PIXELS = (3, 16, 16), 10, 3 * 16 * 16
TASK = SimpleNamespace(image_shape=SHAPE, num_classes=NUM_CLASSES)
KIND = ImageKind(SHAPE, NUM_CLASSES)
TREE, EXPERTS = "[0,[1,3],2]", 4
SIDES = [16] * 2 + [8] * 2 + [4] * 4 + [2] * 4 + [1] * 4
CHANNELS = "4,4,5,4,4,4,4,4,6,4,4,4,4,4,4,7"

BUILT = {
    "alma_firefly_vgg": (models.AlmaFireflyVGG, models.AlmaFireflyVGGConfig(channels=4, layer_channels=CHANNELS)),
    "alma_mlp": (models.AlmaMLP, models.AlmaMLPConfig(width=7, hidden_layers=3)),
    "alma_vgg": (models.AlmaVGG, models.AlmaVGGConfig(channels=4)),
    "alma_moe_mlp": (
        models.AlmaMoEMLP,
        models.AlmaMoEMLPConfig(width=7, num_experts=EXPERTS, gate_trees=f"[{TREE},[0,1,2,3]]"),
    ),
    "alma_moe_vgg": (
        models.AlmaMoEVGG,
        models.AlmaMoEVGGConfig(channels=4, num_experts=EXPERTS, gate="hard", gate_trees=f"[{','.join([TREE] * 16)}]"),
    ),
}


@pytest.mark.parametrize("arch", BUILT)
def test_members_in_one_network_are_the_models_of_their_seeds(arch):
    model_class, config = BUILT[arch]
    assert ARCH_MODEL_REGISTRY[arch] is model_class
    assert model_class.build_model(config, TASK)(torch.randn(6, *SHAPE)).shape == (6, NUM_CLASSES)
    network = model_class.build_members(config, KIND, 3)
    network.reset_parameters([seeded(seed) for seed in range(3)])
    assert isinstance(network, NetworkList) == arch.startswith("alma_moe")
    images = torch.randn(6, *SHAPE, generator=seeded(9))
    together = network.eval()(images)
    for member in range(3):
        alone = model_class.build_members(config, KIND, 1)
        alone.reset_parameters([seeded(member)])
        torch.testing.assert_close(together[member], alone.eval()(images)[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("arch", "num_members"), [("alma_mlp", 1), ("alma_vgg", 1), ("alma_moe_vgg", 2)])
def test_only_batch_norm_on_small_images_refuses_a_batch_of_one_image(arch, num_members):
    model_class, config = BUILT[arch]
    for side in (31, 32):
        images, task = torch.zeros(1, 3, side, 16), SimpleNamespace(image_shape=(3, side, 16), num_classes=NUM_CLASSES)
        model = model_class.build_model(config, task, num_members)
        refused = pytest.raises(AlmaError, match="--batch-size: batch norm cannot train on a batch of 1")
        with refused if "vgg" in arch and side == 31 else nullcontext():
            assert model(images).shape == (1, NUM_CLASSES)
        assert model.eval()(images).shape == (1, NUM_CLASSES)


def test_parameters_and_flops_of_the_fully_connected_network_follow_the_formula():
    model_class, config = BUILT["alma_mlp"]
    network = model_class.build_members(config, KIND, 2)
    num_weights = PIXELS * 7 + 2 * 7**2 + 7 * NUM_CLASSES
    assert sum(p.numel() for p in network.parameters()) == 2 * (num_weights + 3 * 7 + NUM_CLASSES)
    flops = count_flops(network, SHAPE)
    assert flops.test == 2 * 2 * num_weights
    assert flops.train == 3 * flops.test


def test_flops_of_the_vgg_network_follow_the_formula():
    model_class, config = BUILT["alma_vgg"]
    network = model_class.build_members(config, KIND, 1)
    network.reset_parameters([seeded(1)])
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    inputs = [SHAPE[0]] + [4] * 15
    forward = sum(2 * 9 * 4 * before * side**2 for before, side in zip(inputs, SIDES, strict=True))
    flops = count_flops(network, SHAPE)
    assert flops.test == forward + 2 * 4 * NUM_CLASSES
    assert flops.train == 3 * flops.test
    assert all(torch.equal(network.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("gate", ["soft", "hard"])
def test_a_mixture_costs_all_experts_in_training_and_with_hard_gates_one_at_test(gate):
    config = models.AlmaMoEMLPConfig(width=7, num_experts=EXPERTS, gate=gate, gate_trees=f"[{TREE},{TREE}]")
    network = models.AlmaMoEMLP.build_members(config, KIND, 1)
    network.reset_parameters([seeded(1)])
    gates = sum(2 * 5 * inputs + 2 * 2 * 5 * EXPERTS for inputs in (PIXELS, 7))  # 5 rows, two products along the paths
    last = 2 * 7 * NUM_CLASSES
    one_expert = 2 * (PIXELS * 7 + 7 * 7)
    everyone = gates + last + EXPERTS * one_expert + 2 * (2 * EXPERTS * 7)
    flops = count_flops(network, SHAPE)
    assert flops.train == 3 * everyone
    assert flops.test == (everyone if gate == "soft" else gates + last + one_expert)


def test_a_mixture_of_one_expert_is_the_plain_network():
    plain = models.AlmaMLP.build_members(models.AlmaMLPConfig(width=7), KIND, 1)
    mixture = models.AlmaMoEMLP.build_members(models.AlmaMoEMLPConfig(width=7), KIND, 1)
    plain.reset_parameters([seeded(1)])
    mixture.reset_parameters([seeded(2)])
    layers = [*(layer.linear for layer in mixture_layers(mixture)), mixture.classifier]
    for ours, theirs in zip(layers, plain.layers, strict=True):
        ours.load_state_dict(theirs.state_dict())
    images = torch.randn(5, *SHAPE)
    torch.testing.assert_close(mixture(images), plain(images))


@pytest.mark.parametrize(
    ("arch", "options", "parts"),
    [
        ("alma_mlp", {"width": 0}, ("--width 0", "at least 1")),
        ("alma_moe_mlp", {"gate_trees": "[[0,1]]"}, ("--gate-trees", "2 trees")),
        ("alma_moe_mlp", {"gate_trees": "[[0,1],[0,1]]"}, ("--gate-trees", "2 experts", "but --num-experts is 4")),
        ("alma_moe_mlp", {"gate_trees": "oops"}, ("--gate-trees",)),
        ("alma_firefly_vgg", {"layer_channels": "4,4,5"}, ("--layer-channels 4,4,5", "16 comma-separated numbers")),
        ("alma_firefly_vgg", {"layer_channels": CHANNELS.replace("5", "0")}, ("--layer-channels", "of at least 1")),
        ("alma_firefly_vgg", {"channels": 5}, ("--channels 5", "before any growth")),
    ],
)
def test_invalid_options_of_a_model_are_refused_in_one_line(arch, options, parts):
    model_class, config = BUILT[arch]
    with pytest.raises(AlmaError) as error:
        model_class.build_model(type(config)(**{**vars(config), **options}), TASK)
    assert all(part in str(error.value) for part in parts) and "\n" not in str(error.value)


def grown_layers(network):
    return models.GrownLayers(tuple(layer.gate.tree for layer in mixture_layers(network)))


def test_grown_layers_or_their_options_build_the_grown_network_again():
    network = models.AlmaMoEMLP.build_members(models.AlmaMoEMLPConfig(width=7, num_experts=2), KIND, 1)
    network.reset_parameters([seeded(1)])
    assert grown_layers(network).options() == {"num_experts": 2, "gate_trees": ""}
    for number, layer in enumerate(mixture_layers(network)):
        layer.grow(number, seeded(number))
    grown = grown_layers(network)
    assert grown.options() == {"num_experts": 3, "gate_trees": "[[[0,2],1],[0,[1,2]]]"}
    assert grown.trees == (GateTree.from_nested([[0, 2], 1]), GateTree.from_nested([0, [1, 2]]))
    written = models.AlmaMoEMLPConfig(width=7, **grown.options())
    assert models.AlmaMoEMLP.read_grown(written) == grown
    images = torch.randn(5, *SHAPE)
    for config, given in ((written, None), (models.AlmaMoEMLPConfig(width=7, num_experts=2), grown)):
        again = models.AlmaMoEMLP.build_members(config, KIND, 1, given)
        again.load_state_dict(network.state_dict())
        assert torch.equal(again.eval()(images), network.eval()(images))
        assert grown_layers(again) == grown


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return make_stream(tmp_path_factory.mktemp("images") / "S", num_megabatches=2, num_train=40, shape=SHAPE)


@pytest.mark.parametrize(
    ("learner", "words", "joint_logits"),
    [
        ("sm", ["--arch", "alma_vgg", "--channels", "3", "--initial-weights", "default"], "mean"),
        ("gmoe", ["--arch", "alma_moe_mlp", "--width", "5", "--gate", "hard"], "mean"),
        ("umix", ["--arch", "alma_mlp", "--width", "5"], "sum"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[1],
)
def test_fairseq_loads_the_same_model_from_a_checkpoint(learner, words, joint_logits, stream, tmp_path):
    num_joint = 2 if learner == "umix" else 1
    options = ImageTrainOptions([*words, "--cpu"], LEARNERS["images"][learner], for_photographs=False)
    settings = ImageSettings(ImageStream.open(stream), options, num_joint, joint_logits)
    network = settings.build(1)
    network.reset_parameters([seeded(seed) for seed in range(num_joint)])
    for layer in mixture_layers(network):
        layer.grow(0, seeded(7))
    grown = grown_layers(network)
    path = tmp_path / "checkpoint_last.pt"
    write_model(path, TrainedModel(network.state_dict(), grown, 1, 1), settings.checkpoint_config(grown))
    (model,), config, task = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    assert config.model._name == ("alma_umix" if learner == "umix" else words[1])
    images = torch.randn(4, *SHAPE)
    logits = network.eval().member_logits(images, ())
    expected = logits.sum(dim=0) if joint_logits == "sum" else logits.mean(dim=0)
    torch.testing.assert_close(model.eval()(images), expected, rtol=1e-4, atol=1e-5)
    assert task.image_shape == SHAPE
