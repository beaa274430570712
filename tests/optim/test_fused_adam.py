import pytest
import torch
from fairseq import optim
from fairseq.optim.adam import FairseqAdamConfig
from omegaconf import OmegaConf

import fairseq_alma
from fairseq_alma.optim.fused_adam import FusedAdamConfig

fairseq_alma.register()
CONFIGS = {"adam": FairseqAdamConfig, "fused_adam": FusedAdamConfig}


def optimizer_of(name, parameters, **options):
    cfg = OmegaConf.structured(CONFIGS[name](adam_betas=(0.9, 0.98), **options))
    cfg.lr = [0.01]
    if name == "adam":
        cfg.tpu = False
    return optim.OPTIMIZER_REGISTRY[name](cfg, parameters)


def updated(name, num_updates, resume_at=None, **options):
    """Return weights after some updates; with another optimizer, which loads the first one's state, in between."""
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,))]
    optimizer = optimizer_of(name, parameters, **options)
    for update in range(num_updates):
        if update == resume_at:
            state = optimizer.state_dict()
            optimizer = optimizer_of(name, parameters, **options)
            optimizer.load_state_dict(state)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}])
def test_it_does_what_fairseq_s_adam_does(options):
    torch.testing.assert_close(updated("fused_adam", 7, **options), updated("adam", 7, **options))


def test_it_resumes_to_the_last_bit():
    assert torch.equal(updated("fused_adam", 7), updated("fused_adam", 7, resume_at=4))
