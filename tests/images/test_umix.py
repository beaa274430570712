from types import SimpleNamespace

import pytest
import torch
from fairseq import models
from omegaconf import OmegaConf

from fairseq_alma.errors import AlmaError

TASK = SimpleNamespace(image_shape=(1, 6, 6), num_classes=3)


def umix_of(**options):
    torch.manual_seed(0)
    config = {"_name": "alma_umix", "num_members": 3, "member_arch": "alma_mlp", "member_options": "--width 4"}
    return models.build_model(OmegaConf.create({**config, **options}), TASK)


def test_members_have_the_given_options_and_different_weights():
    weight = umix_of().network.layers[0].weight
    assert weight.shape == (3, 4, 36) and not torch.equal(weight[0], weight[1])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_members": 0}, "--num-members 0"),
        ({"member_arch": "alma_vggg"}, "--member-arch alma_vggg: .*alma_mlp"),
        ({"member_arch": "alma_switch_lm"}, "--member-arch alma_switch_lm: cannot be a member"),
        ({"member_options": "--expert 3"}, "--member-options: unrecognized arguments: --expert 3"),
        ({"member_options": "--width three"}, "--member-options: .*invalid int value: 'three'"),
        ({"member_options": "--width '3"}, "--member-options: .*No closing quotation"),
    ],
)
def test_invalid_options_are_refused_in_one_line(options, named):
    with pytest.raises(AlmaError, match=named) as error:
        umix_of(**options)
    assert "\n" not in str(error.value)
