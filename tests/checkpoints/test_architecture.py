"""The shapes that an architecture says its weights have are those of the model that fairseq builds, on ``meta``."""

from types import SimpleNamespace

import pytest
import torch
from fairseq import models
from fairseq.models import MODEL_DATACLASS_REGISTRY
from omegaconf import OmegaConf

from fairseq_alma.checkpoints import UnfitCheckpoint
from fairseq_alma.checkpoints.architecture import ARCHITECTURES, check_model
from tests.models.ensembles import switch_config, task_of, transformer_config

TREES = "[[0,1,[2,3]],[[0,3],[1,[2]]]]"
STACK = "--channels 4 --layer-channels " + ",".join(map(str, range(4, 20)))


def image_config(name, **options):
    return {**vars(MODEL_DATACLASS_REGISTRY[name]()), "_name": name, **options}


def joint(arch, options, num_members=2):
    return {"_name": "alma_umix", "num_members": num_members, "member_arch": arch, "member_options": options,
            "joint_logits": "mean", "tokens_per_sample": None, "max_target_positions": None}  # fmt: skip


CONFIGS = {
    "dense": lambda: switch_config(moe_freq=0),
    "switch": lambda: switch_config(),
    "trees": lambda: switch_config(gate_trees=TREES),
    "sinusoidal": lambda: switch_config(decoder_sinusoidal_pos=True),
    "stock": transformer_config,
    "mlp": lambda: image_config("alma_mlp", width=5, hidden_layers=3),
    "vgg": lambda: image_config("alma_vgg", channels=4, last_pool="max"),
    "firefly": lambda: image_config("alma_firefly_vgg", channels=4, layer_channels=STACK.split()[-1]),
    "mixtures": lambda: image_config("alma_moe_mlp", width=4, num_experts=3, gate_trees="[[0,[1,2]],[0,1,2]]"),
    "deeper firefly": lambda: image_config(
        "alma_firefly_vgg", channels=4, layer_channels=STACK.split()[-1] + ",9,9", group_layers="2,3,4,4,5"
    ),
    "convolutions": lambda: image_config("alma_moe_vgg", channels=4, num_experts=2),
    "stack": lambda: joint("alma_mlp", "--width 6", 3),
    "stack of convolutions": lambda: joint("alma_firefly_vgg", STACK),
    "mixtures side by side": lambda: joint("alma_moe_mlp", "--num-experts 2 --width 4"),
}


def build(config):
    images = SimpleNamespace(image_shape=(3, 32, 32), num_classes=7)
    is_text = "decoder" in str(config)
    with torch.device("meta"):
        return models.build_model(OmegaConf.create(config), task_of() if is_text else images)


def enlarged(tensor):
    """Return one with more outputs; how many inputs the first layer has is for the stream to say."""
    shape = list(tensor.shape)
    shape[max(0, len(shape) - 2)] += 1
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_of_a_model_that_is_built_pass_and_any_other_shape_is_refused(kind):
    config = CONFIGS[kind]()
    weights = dict(build(config).state_dict())
    check_model(config, weights)
    known = [name for name in weights if kind != "stock" or "embed_positions" in name]
    for name in known:
        for altered in (
            {key: tensor for key, tensor in weights.items() if key != name},
            {**weights, name: enlarged(weights[name])},
        ):
            with pytest.raises(UnfitCheckpoint) as error:
                check_model(config, altered)
            assert "\n" not in str(error.value)
    if kind != "stock":
        with pytest.raises(UnfitCheckpoint):
            check_model(config, {**weights, "more.weight": torch.empty(1, device="meta")})


def test_every_architecture_of_this_package_is_known_to_the_gate():
    ours = {name for name in models.ARCH_MODEL_REGISTRY if name.startswith("alma_")}
    assert ours and ours <= ARCHITECTURES.keys()
