"""Anytime Learning at Macroscale for fairseq: streams of mega-batches, models that grow, ensembles.

For notebooks: `open_stream`, `load_model` (of a run, at an arrival), `score`, `read_run`; see ``recipes/tour.py``.

Packages, each importing only what stands above it:

- ``metrics``, ``data``, ``checkpoints``, ``growth``: figures, files, plain tensors; no fairseq
- ``learners``: what a learner decides: the schedule of stages and the plan of each
- ``moe``: one mixture of experts, for text and images
- ``runs``: Algorithm 1, once: the loop, the run folder and its records
- ``watch``: what a user sees of a run
- ``training``: what a training can do beside learning, and processes that share the work
- ``exchange``: folders that transformers reads, written and read; no fairseq
- ``text``, ``images``: two wings, each with its task, data, models, criterion, and what trains and tests
- ``models``, ``optim``, ``criterions``, ``tasks``: what fairseq finds under their registered names
- ``report``: what the files of runs say, as tables, findings and figures; needs neither torch nor fairseq
- ``cli``: the ``alma-*`` commands, and in ``front_door`` what notebooks use

``import fairseq`` takes seconds and prints warnings of its own, which commands that only touch files (preparing text,
printing a plan, a report) should not pay for. So importing this package imports neither fairseq nor transformers: what
they should know is registered at once with what is loaded already (fairseq always is under ``--user-dir``), and
otherwise right after it has been imported.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:  # each command imports this before it can answer Ctrl-C
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Callable, Optional, Sequence

    from fairseq_alma.cli.front_door import load_model, open_stream, read_run, score

if sys.platform == "win32":
    raise ImportError("fairseq_alma needs Linux or macOS; on Windows, use the Windows Subsystem for Linux")

__version__ = "0.2.0"
__all__ = ["load_model", "open_stream", "read_run", "register", "score"]

PLUGIN_PACKAGES = ("fairseq_alma.criterions", "fairseq_alma.models", "fairseq_alma.optim", "fairseq_alma.tasks")


def register() -> None:
    """Import every module that registers a name with fairseq; a second call does nothing."""
    for package in PLUGIN_PACKAGES:
        importlib.import_module(package)


def register_with_transformers() -> None:
    """Let ``AutoConfig`` and ``AutoModelForCausalLM`` know exported models without ``trust_remote_code``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from fairseq_alma.exchange import modeling_alma

    if not hasattr(modeling_alma, "AlmaForCausalLM"):
        raise ImportError("import transformers before fairseq_alma.exchange.modeling_alma, which is registered with it")
    AlmaConfig, AlmaForCausalLM = modeling_alma.AlmaConfig, modeling_alma.AlmaForCausalLM
    AutoConfig.register(AlmaConfig.model_type, AlmaConfig, exist_ok=True)
    AutoModelForCausalLM.register(AlmaConfig, AlmaForCausalLM, exist_ok=True)


def _hide_torchaudio_that_fails() -> None:
    """Let transformers find no torchaudio where importing it fails: it imports what is installed, even for text.

    fairseq for Python 3.11 brings a build for CUDA, which cannot be imported beside a torch for CPUs.
    """
    import importlib.util

    if "torchaudio" in sys.modules or importlib.util.find_spec("torchaudio") is None:
        return
    try:
        importlib.import_module("torchaudio")
    except Exception:  # of many kinds: OSError for a library that is missing, RuntimeError for another CUDA
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchaudio"]:
            del sys.modules[name]
        sys.modules["torchaudio"] = None  # type: ignore[assignment]


class _RegisterAfterOwnImports:
    """Registers when a module of this package, and all that it imports, is there: it may be what imports fairseq first.

    To register at once would import what imports it, while its own names are not there yet.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.is_due = False

    def register(self) -> None:
        """Register, now or at the end of the import under way."""
        self.is_due = self.depth > 0
        if not self.is_due:
            register()

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if not fullname.startswith("fairseq_alma."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            self.depth += 1
            try:
                execute(module)
            finally:
                self.depth -= 1
            if self.is_due:
                self.register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


class _RegisterAfter:
    """Find a module as Python would, and call functions around its execution.

    Args:
        name: of the module.
        then: called after it.
        first: called before it.
    """

    def __init__(self, name: str, then: Callable[[], None], first: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.then = then
        self.first = first

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            self.first()
            execute(module)
            self.then()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_when_loaded() -> None:
    """Register now what is loaded, the rest when it gets loaded."""
    own = _RegisterAfterOwnImports()
    sys.meta_path.insert(0, own)
    for finder in (
        _RegisterAfter("fairseq", own.register),
        _RegisterAfter("transformers", register_with_transformers, _hide_torchaudio_that_fails),
    ):
        if finder.name in sys.modules:
            finder.then()
        else:
            sys.meta_path.insert(0, finder)


def __getattr__(name: str) -> object:
    """Import what notebooks use when it is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fairseq_alma.cli import front_door

    return getattr(front_door, name)


register_when_loaded()
