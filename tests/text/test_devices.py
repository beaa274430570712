"""A training step of each language model on another device than the CPU: all tensors are on one device.

Fake tensors have a device and shapes, and no numbers; torch raises where devices are mixed. A CPU build of torch cannot
run autograd on fake CUDA tensors, so the device is ``meta``, which fake tensors treat like any other.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fairseq_alma import moe
from fairseq_alma.text.losses import AlmaSwitchCrossEntropy
from tests.text.models import dictionary_of, model_of, transformer_of


def share_evenly(routing, capacity_factor, padding=None):
    """Replace `dispatch_to_experts`, which reads numbers on the host."""
    num_tokens, num_experts = routing.probs.shape
    counts = [num_tokens // num_experts] * num_experts
    return moe.Dispatch(torch.arange(num_tokens, device=routing.expert.device), counts, counts)


BUILDS = {
    "alma_switch_lm": lambda: model_of(gate_trees="[[0,1,[2,3]],[0,1,2,3]]"),
    "with experts": lambda: transformer_of(num_experts=4),
    "dense": lambda: transformer_of(num_experts=1, share_decoder_input_output_embed=True),
}
each_model = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


def loss_of(model, tokens):
    sample = {"net_input": {"src_tokens": tokens}, "target": tokens, "ntokens": tokens.numel()}
    criterion = AlmaSwitchCrossEntropy(SimpleNamespace(target_dictionary=dictionary_of(46)), False)
    return criterion(model, sample)[0]


@each_model
def test_a_training_step_mixes_no_devices(build, monkeypatch):
    monkeypatch.setattr(moe, "dispatch_to_experts", share_evenly)
    monkeypatch.setattr(torch, "autocast", lambda *unused, **unused_too: contextlib.nullcontext())  # none for meta
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("meta"):
            model = build().train()
        loss_of(model, torch.zeros(4, 24, dtype=torch.int64, device="meta")).backward()
        assert all(parameter.grad.device.type == "meta" for parameter in model.parameters())


@pytest.mark.gpu
@each_model
@pytest.mark.parametrize("in_bf16", [False, True])
def test_loss_and_gradients_on_a_gpu_equal_those_on_a_cpu(build, in_bf16):
    tokens, found = torch.randint(4, 50, (4, 24)), []
    for device in ("cpu", "cuda"):
        model = build().to(device).train()
        with torch.autocast("cuda", torch.bfloat16, enabled=in_bf16):
            loss = loss_of(model, tokens.to(device))
        loss.backward()
        found.append((loss.cpu(), torch.cat([parameter.grad.flatten().cpu() for parameter in model.parameters()])))
    (loss, grads), (their_loss, their_grads) = found
    assert abs(loss - their_loss) < (0.01 if in_bf16 else 1e-4) * loss
    assert (grads - their_grads).norm() < (0.1 if in_bf16 else 1e-3) * grads.norm()
