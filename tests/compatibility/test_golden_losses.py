"""Every kind of gate gives the loss and the gradient that it gave in the version before; see ``golden_losses``."""

import json

import pytest
import torch

from tests.compatibility import golden_losses
from tests.compatibility.archives import KINDS, machine, unpack

GOLDEN = json.loads(golden_losses.GOLDEN.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    archives = {kind: unpack(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield golden_losses.all_losses(archives, tmp_path_factory.mktemp("grown"))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", GOLDEN["losses"])
def test_loss_and_gradient_are_those_of_the_version_before(case, found):
    before, now = GOLDEN["losses"][case], found[case]
    if machine() == GOLDEN["machine"]:
        assert now == before
    for name in before:
        if name.endswith(("loss", "norm")):
            assert float.fromhex(now[name]) == pytest.approx(float.fromhex(before[name]), rel=1e-5)


def test_every_case_has_been_recorded(found):
    assert found.keys() == GOLDEN["losses"].keys()
