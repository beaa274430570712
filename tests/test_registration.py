"""Importing the package registers its names with fairseq in whatever order the two come, and does nothing else.

Each case runs in a process of its own, because an import happens once in a process.
"""

import subprocess
import sys
from pathlib import Path

import pytest

REGISTERED = """
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY

assert "alma_lm" in TASK_REGISTRY
assert "alma_switch_cross_entropy" in CRITERION_REGISTRY
assert "alma_switch_lm" in MODEL_REGISTRY
assert {"alma_switch_lm_tiny", "alma_switch_lm_base", "alma_switch_lm_large"} <= set(ARCH_MODEL_REGISTRY)
"""
STATE = """
def state():
    import logging, random
    import numpy, torch
    root = logging.getLogger()
    generators = random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist()
    return root.level, list(root.handlers), generators
"""
USER_DIR = """
from argparse import Namespace
from fairseq.utils import import_user_module
import_user_module(Namespace(user_dir="fairseq_alma"))
"""


def run_python(code: str, folder: Path) -> str:
    """Run code in a process of its own, which must end well; returns what it printed."""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, timeout=600)
    assert ended.returncode == 0, ended.stderr[-1000:]
    return ended.stdout + ended.stderr


def test_importing_the_package_alone_loads_neither_fairseq_nor_torch_and_prints_nothing(tmp_path: Path) -> None:
    code = """
import logging, sys
import fairseq_alma
assert not {"fairseq", "torch", "numpy"} & set(sys.modules)
assert logging.getLogger().handlers == [] and logging.getLogger().level == logging.WARNING
"""
    assert run_python(code, tmp_path) == ""


@pytest.mark.slow
def test_registering_sets_up_no_logging_draws_no_random_number_and_is_done_once(tmp_path: Path) -> None:
    code = f"""{STATE}
import fairseq
before = state()
import fairseq_alma
assert state() == before
{REGISTERED}
first = TASK_REGISTRY["alma_lm"]
fairseq_alma.register()
assert TASK_REGISTRY["alma_lm"] is first
"""
    run_python(code, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("imports", ["import fairseq_alma\nimport fairseq", "import fairseq_alma.models", USER_DIR])
def test_names_are_registered_in_whatever_order_the_two_are_imported(imports: str, checkout: Path) -> None:
    run_python(imports + REGISTERED, checkout)


@pytest.mark.slow
def test_packages_for_metrics_of_audio_and_sentences_are_imported_at_their_first_use(checkout: Path) -> None:
    code = """
import sys, fairseq_alma, fairseq
assert not {"sklearn", "sklearn.metrics", "scipy.stats", "torch._dynamo"} & sys.modules.keys()
from fairseq.criterions import sentence_prediction
from fairseq.tasks import audio_classification
assert sentence_prediction.pearsonr([1, 2, 3], [2, 4, 6]).statistic > 0.99
assert sentence_prediction.f1_score([1, 0], [1, 0]) == 1
assert len(audio_classification.sklearn_metrics.roc_curve([0, 1], [0.1, 0.9])) == 3
import sklearn.metrics, scipy.stats
assert sklearn.metrics.f1_score([1, 0], [1, 0]) == 1
"""
    run_python(code, checkout)
