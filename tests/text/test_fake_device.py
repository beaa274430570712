"""A training step of each language model on a device other than the CPU: no tensor is made on the wrong one.

Fake tensors have a device and shapes, and no numbers; torch raises where devices are mixed. A CPU build of torch cannot
run autograd on fake CUDA tensors, so the device is ``meta``, which fake tensors treat like any other.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fairseq_alma.moe import switch_layer
from fairseq_alma.moe.dispatch import Dispatch
from fairseq_alma.text.criterion import AlmaSwitchCrossEntropy
from tests.text.models import dictionary_of, model_of, transformer_of


def share_evenly(routing, capacity_factor, padding=None):
    """Stand in for `dispatch_tokens`, which reads numbers on the host."""
    num_tokens, num_experts = routing.probs.shape
    counts = [num_tokens // num_experts] * num_experts
    return Dispatch(torch.arange(num_tokens, device=routing.expert.device), counts, counts)


@pytest.mark.parametrize(
    "build",
    [
        lambda: model_of(gate_trees="[[0,1,[2,3]],[0,1,2,3]]"),
        lambda: transformer_of(num_experts=4),
        lambda: transformer_of(num_experts=1, share_decoder_input_output_embed=True),
    ],
    ids=["alma_switch_lm", "with experts", "dense"],
)
def test_a_training_step_mixes_no_devices(build, monkeypatch):
    monkeypatch.setattr(switch_layer, "dispatch_tokens", share_evenly)
    monkeypatch.setattr(torch, "autocast", lambda *unused, **unused_too: contextlib.nullcontext())  # none for meta
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("meta"):
            model = build().train()
        tokens = torch.zeros(4, 24, dtype=torch.int64, device="meta")
        sample = {"net_input": {"src_tokens": tokens}, "target": tokens, "ntokens": 96}
        criterion = AlmaSwitchCrossEntropy(SimpleNamespace(target_dictionary=dictionary_of(46)), False)
        criterion(model, sample)[0].backward()
        assert all(parameter.grad.device.type == "meta" for parameter in model.parameters())
