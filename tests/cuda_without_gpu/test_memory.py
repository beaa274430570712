"""That headers of recipes say what their trainings need of a GPU, as counted. A real one takes more."""

import functools
import re
import shutil

import pytest
import torch

from tests.cuda_without_gpu.memory import RECIPES, need_of, training_of

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="a compiler makes the device guard"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="counted on fake tensors"),
]
NAMES = [f"{learner}_{size}" for size in ("base", "large") for learner in ("sm", "ens", "gens", "gmoe")]
MARKED = [pytest.param(name, marks=pytest.mark.slow if name != "ens_base" else ()) for name in NAMES]


@functools.cache
def gigabytes(words, num_experts):
    return need_of(list(words), num_experts).most / 1e9


@pytest.mark.parametrize("name", MARKED)
def test_the_header_of_a_recipe_and_its_table_say_what_its_training_needs(name):
    (line,) = re.findall(r"^# Memory: +of each GPU about (.*)$", (RECIPES / f"{name}.sh").read_text(), re.MULTILINE)
    stated = [float(each) for each in re.findall(r"\d+\.\d+", line)]
    experts = [int(each) for each in re.findall(r"(?<!\.)\b\d+\b(?!\.)", line)] or [4]
    size = name.split("_")[1]
    rows = re.findall(rf"^\| `lm/\*_{size}.sh` \|(.*)$", (RECIPES.parent / "README.md").read_text(), re.MULTILINE)
    table = {int(cells[0]): float(cells[5].split()[0]) for cells in (row.split("|") for row in rows)}
    words = tuple(training_of(name))
    for number, gb in zip(experts, stated, strict=True):
        assert gb == table[number] == pytest.approx(gigabytes(words, number), rel=0.03)
