"""What the trainings of ``recipes/lm`` need of a device, counted from the commands that the recipes print."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.optim import build_optimizer
from omegaconf import OmegaConf

from fairseq_alma.moe.short_copies import batch_of_update
from fairseq_alma.text.model import build_from_config
from tests.cuda_without_gpu.fake_cuda import counted, cuda
from tests.cuda_without_gpu.programs import VOCABULARY, learn, step, tokens_of

RECIPES = Path(__file__).parents[2] / "recipes/lm"


class Need(NamedTuple):
    """Of each device: parameters, and bytes of them with their moments, of buckets, and of all at the most."""

    parameters: int
    kept: int
    buckets: int
    most: int


def training_of(recipe):
    """Return the first training of a recipe, as words, but for where it is saved."""
    command = ["bash", str(RECIPES / f"{recipe}.sh"), "--dry-run", "--stage", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (words, *_) = re.findall(r"fairseq-train ([^&\n]*)", done.stdout.replace("\\\n", " "))
    return shlex.split(re.sub(r"--save-dir \S+", "", words))


def need_of(words, num_experts=None):
    """Count two updates of a training, of two batches each: gradients of the first are there in the second."""
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), words))
    config = OmegaConf.to_container(cfg.model, resolve=True)
    config |= {} if num_experts is None else {"num_experts": num_experts}
    with cuda(), counted() as counts:
        model = build_from_config(config, VOCABULARY, "cuda").train()
        parameters = sum(each.numel() for each in model.parameters())
        # torch's data parallel has room for all gradients a second time; it cannot be had on fake tensors
        buckets = torch.empty(parameters if cfg.distributed_training.distributed_world_size > 1 else 0, device="cuda")
        optimizer = build_optimizer(cfg.optimizer, list(model.parameters()))
        for update in range(2):
            with batch_of_update(update):
                for _ in range(2):
                    sample = tokens_of(cfg.dataset.batch_size, cfg.task.tokens_per_sample)
                    learn(model, sample, cfg.task.autocast or "fp32")
            step(optimizer)
            optimizer.zero_grad()
    return Need(parameters, 12 * parameters, buckets.nbytes, counts.peak)
