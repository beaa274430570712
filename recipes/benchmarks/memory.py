"""Estimate the memory that training takes on each device: what the headers of ``recipes/lm`` say.

    python recipes/benchmarks/memory.py                # base and large with 4, 8 and 12 experts; two minutes on a CPU

Weights, gradients and Adam's two moments are 16 bytes for each parameter, in fp32, the same on each device. Activations
are what autograd keeps of one batch from the forward to the backward pass, counted on a CPU (``--autocast bf16``, one
sequence of 512 tokens and two, and in proportion). Not counted: what the allocator and the libraries of a GPU keep
beside that (a GB or more), buckets of gradients under way between devices (at worst as much as the gradients).
"""

import argparse
import logging
import tempfile
from pathlib import Path
from typing import Sequence

import numpy as np
import torch
from lm_speed import NUM_UNITS, build_trainer, random_sample

import fairseq_alma

GB = 1e9
BYTES_OF_A_PARAMETER = 4 + 4 + 8  # weight, gradient, moments
BATCH_SIZE = 8  # sequences of 512 tokens that a device computes at a time, as in recipes/lm/common.sh


def activation_bytes(model: torch.nn.Module, criterion: torch.nn.Module, sample: dict) -> int:
    """Return the bytes that the backward pass of a batch needs, beside the parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage  # which also keeps the address from being used again
        return tensor

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        criterion(model, sample)
    return sum(storage.nbytes() for storage in kept.values())


def sample_of(batch_size: int, args: argparse.Namespace) -> dict:
    """Return a batch of so many sequences."""
    return random_sample(argparse.Namespace(**{**vars(args), "batch_size": batch_size}), np.random.default_rng(1))


def main(sizes: Sequence[str], num_experts: Sequence[int]) -> None:
    """Print a row for each model."""
    options = {
        "tokens_per_sample": 512,
        "batch_size": 1,
        "attention_dropout": 0.0,
        "optimizer": "adam",
        "compile": False,
    }
    args = argparse.Namespace(**options, cpu=True)
    fairseq_alma.register()
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    print("| model | experts | parameters | weights, gradients, moments | activations of 8 x 512 tokens | together |")
    print("|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "dict.txt").write_text("".join(f"w{unit} 1\n" for unit in range(NUM_UNITS)))
        for size in sizes:
            for experts in num_experts:
                trainer = build_trainer(experts, size, Path(folder), args)
                model, criterion = trainer.get_model(), trainer.get_criterion()
                parameters = sum(parameter.numel() for parameter in model.parameters())
                one, two = (activation_bytes(model, criterion, sample_of(number, args)) for number in (1, 2))
                activations = one + (BATCH_SIZE - 1) * (two - one)  # casts of weights do not grow with the batch
                fixed = BYTES_OF_A_PARAMETER * parameters
                figures = [f"{each / GB:.1f} GB" for each in (fixed, activations, fixed + activations)]
                print(f"| {size} | {experts} | {parameters / 1e6:.0f} M | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["base", "large"], choices=["tiny", "base", "large"])
    parser.add_argument("--experts", nargs="+", type=int, default=[4, 8, 12])
    given = parser.parse_args()
    main(given.sizes, given.experts)
