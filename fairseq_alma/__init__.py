"""Anytime Learning at Macroscale for fairseq: streams of mega-batches, models that grow, ensembles.

For notebooks: `open_stream`, `load_model` (of a run, at an arrival), `score`, `read_run`; see ``recipes/tour.py``.

Packages; each imports only packages above it:

- ``metrics``, ``data``, ``checkpoints``, ``growth``: numbers, files, plain tensors; no fairseq
- ``learners``: the schedule of stages and the plan of each stage
- ``moe``: one mixture of experts, for text and images
- ``runs``: Algorithm 1: the loop, the run folder and its records
- ``watch``: the progress of a run
- ``training``: features of a training, and processes that share it
- ``text``, ``images``: tasks, data, models, criterions, training and test of each kind of data
- ``exchange``: export to transformers, and import
- ``models``, ``optim``, ``criterions``, ``tasks``: modules that fairseq finds under registered names
- ``report``: tables, figures and one page from the records of runs; no torch, no fairseq
- ``cli``: the ``alma-*`` commands, and the functions for notebooks in ``front_door``

``import fairseq`` takes seconds and prints warnings, so commands that only read files must not need it. Importing this
package therefore does not import fairseq. Names are registered at once if fairseq is loaded (as under ``--user-dir``),
otherwise as soon as it is.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:  # each command imports this module before it can handle Ctrl-C
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Optional, Sequence

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


class _RegisterAfterFairseq:
    """Call `register` after fairseq is loaded and no module of this package is half imported."""

    depth = 0  # of imports of this package under way
    is_due = False

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        is_own = fullname.startswith("fairseq_alma.")
        spec = PathFinder.find_spec(fullname, path, target) if is_own or fullname == "fairseq" else None
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            self.depth += is_own
            try:
                execute(module)
            finally:
                self.depth -= is_own
            self.is_due |= not is_own
            if self.is_due and not self.depth:
                self.is_due = False
                register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def __getattr__(name: str) -> object:
    """Import the functions for notebooks when they are used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fairseq_alma.cli import front_door

    return getattr(front_door, name)


sys.meta_path.insert(0, _RegisterAfterFairseq())
if "fairseq" in sys.modules:
    register()
