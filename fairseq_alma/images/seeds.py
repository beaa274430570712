"""Generators for everything that is drawn at random, each from what it is for: nothing depends on what ran before."""

import numpy as np
import torch

INITIAL_WEIGHTS, ORDER, BOOTSTRAP, GROWTH, PERTURBATION = range(5)


def seeded(*numbers: int) -> torch.Generator:
    """Return a generator on the CPU that is seeded by all of these numbers."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)
