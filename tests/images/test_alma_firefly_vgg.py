from types import SimpleNamespace

import pytest
import torch
from fairseq.models import ARCH_MODEL_REGISTRY

from fairseq_alma.errors import AlmaError
from fairseq_alma.images.firefly import grow_firefly
from fairseq_alma.images.image_models import AlmaFireflyVGG, AlmaFireflyVGGConfig, AlmaVGG, AlmaVGGConfig
from fairseq_alma.images.networks import ImageKind

TASK = SimpleNamespace(image_shape=(3, 16, 16), num_classes=10)
KIND = ImageKind(TASK.image_shape, 10)
GROWN = "4,4,5,4,4,4,4,4,6,4,4,4,4,4,4,7"


def built(channels=4, layer_channels="", task=TASK):
    torch.manual_seed(0)
    return AlmaFireflyVGG.build_model(AlmaFireflyVGGConfig(channels=channels, layer_channels=layer_channels), task)


def test_it_is_registered():
    assert ARCH_MODEL_REGISTRY["alma_firefly_vgg"] is AlmaFireflyVGG


def test_before_any_growth_it_is_the_vgg_network():
    torch.manual_seed(0)
    plain = AlmaVGG.build_model(AlmaVGGConfig(channels=4), TASK)
    model = built()
    assert all(torch.equal(model.state_dict()[name], values) for name, values in plain.state_dict().items())


def test_each_layer_has_the_channels_that_growth_wrote():
    model = built(layer_channels=GROWN)
    assert [block.conv.weight.size(1) for block in model.network.blocks] == [int(word) for word in GROWN.split(",")]
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 10)
    assert AlmaFireflyVGG.grown_layers(model.network).options() == {"layer_channels": GROWN}


def test_a_grown_network_is_built_again_from_its_options():
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(32, 3, 16, 16, generator=generator), torch.arange(32) % 10
    grown = grow_firefly(built().network, [(images, labels)], [4] * 16, 0.25, generator).eval()
    options = AlmaFireflyVGG.grown_layers(grown).options()
    again = AlmaFireflyVGG.build_members(AlmaFireflyVGGConfig(channels=4, **options), KIND, 1).eval()
    assert options != {"layer_channels": ",".join(["4"] * 16)}
    again.load_state_dict(grown.state_dict())
    assert torch.equal(again(images), grown(images))


def test_members_stand_in_one_stack():
    network = AlmaFireflyVGG.build_members(AlmaFireflyVGGConfig(channels=4, layer_channels=GROWN), KIND, 3)
    network.reset_parameters([torch.Generator().manual_seed(seed) for seed in range(3)])
    assert network(torch.randn(2, 3, 16, 16)).shape == (3, 2, 10)
    assert AlmaFireflyVGG.grown_layers(network).options() == {"layer_channels": GROWN}


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"channels": 0}, ("--channels 0", "at least 1")),
        ({"layer_channels": "4,4,5"}, ("--layer-channels 4,4,5", "3 numbers", "16 are needed")),
        ({"layer_channels": GROWN.replace("5", "five")}, ("--layer-channels", "five", "numbers of at least 1")),
        ({"layer_channels": GROWN.replace("5", "0")}, ("--layer-channels", "at least 1")),
        ({"layer_channels": GROWN.replace("5", "-5")}, ("--layer-channels", "at least 1")),
        ({"layer_channels": GROWN.replace("5", "4.5")}, ("--layer-channels", "at least 1")),
        ({"channels": 5, "layer_channels": GROWN}, ("--channels 5", "before any growth")),
        ({"task": SimpleNamespace(image_shape=(1, 8, 8), num_classes=10)}, ("alma_firefly_vgg", "8 by 8")),
    ],
)
def test_options_that_mean_nothing_are_refused_in_one_line(options, parts):
    with pytest.raises(AlmaError) as error:
        built(**options)
    assert all(part in str(error.value) for part in parts)
    assert "\n" not in str(error.value)
