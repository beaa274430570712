"""Anytime Learning at Macroscale for fairseq: streams of mega-batches, models that grow, ensembles.

For notebooks: `open_stream`, `load_model` (of a run, at an arrival), `score`, `read_run`; see ``recipes/tour.py``.

Packages, each importing only what stands above it:

- ``metrics``, ``data``, ``checkpoints``, ``growth``: figures, files, plain tensors; no fairseq
- ``learners``: what a learner decides: the schedule of stages and the plan of each
- ``moe``: one mixture of experts, for text and images
- ``runs``: Algorithm 1, once: the loop, the run folder and its records
- ``watch``: what a user sees of a run
- ``training``: what a training can do beside learning, and processes that share the work
- ``exchange``: export to transformers, and import
- ``text``, ``images``: two wings, each with its task, data, models, criterion, and what trains and tests
- ``models``, ``optim``, ``criterions``, ``tasks``: what fairseq finds under their registered names
- ``report``: tables, figures and one page from the records of runs; needs neither torch nor fairseq
- ``cli``: the ``alma-*`` commands, and in ``front_door`` what notebooks use

``import fairseq`` takes seconds and prints warnings of its own, which commands that only touch files (preparing text,
printing a plan, a report) should not pay for. So importing this package does not import fairseq: names are registered
at once if it is loaded already (it always is under ``--user-dir``), and otherwise right after it has been imported.
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

__version__ = "0.3.0"
__all__ = ["load_model", "open_stream", "read_run", "register", "score"]

PLUGIN_PACKAGES = ("fairseq_alma.criterions", "fairseq_alma.models", "fairseq_alma.optim", "fairseq_alma.tasks")


def register() -> None:
    """Import every module that registers a name with fairseq; a second call does nothing."""
    for package in PLUGIN_PACKAGES:
        importlib.import_module(package)


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
    """Find a module as Python would, and call ``then`` after its execution."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self.then = then

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
            execute(module)
            self.then()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_when_loaded() -> None:
    """Register now what is loaded, the rest when it gets loaded."""
    own = _RegisterAfterOwnImports()
    sys.meta_path.insert(0, own)
    if "fairseq" in sys.modules:
        own.register()
    else:
        sys.meta_path.insert(0, _RegisterAfter("fairseq", own.register))


def __getattr__(name: str) -> object:
    """Import what notebooks use when it is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fairseq_alma.cli import front_door

    return getattr(front_door, name)


register_when_loaded()
