"""Anytime Learning at Macroscale for fairseq: streams of mega-batches, models that grow, ensembles.

Functions for notebooks: `open_stream`, `load_model`, `score` and `read_run`; see ``recipes/tour.py``.

Packages (each package imports only packages above it):

- ``data``, ``checkpoints``, ``growth``: streams, checkpoint files and network growth, without fairseq
- ``learners``: the schedule of stages and the plan of each stage
- ``moe``: mixture of experts for text and images
- ``runs``: Algorithm 1 of the paper (loop over stages), run folder and records, progress display
- ``training``: optional training features, and the base class of the tasks
- ``text``, ``images``: tasks, data sets, models, criterions, training and evaluation for each kind of data
- ``exchange``: export to and import from Hugging Face transformers
- ``models``, ``optim``: models and optimizers that fairseq finds by name; `register` lists all such modules
- ``report``: tables, figures and an HTML page from the records of runs, without torch and fairseq
- ``cli``: the ``alma-*`` commands, and the functions for notebooks in ``notebook``

``import fairseq_alma`` does not import fairseq, because this takes seconds and prints warnings. The package registers
names with fairseq when fairseq is imported, or immediately if fairseq is already imported (as with ``--user-dir``).

The installed commands are attributes of this module, such as ``alma_stream``, so that they handle Ctrl-C during the
import of the command, which takes a quarter of a second; `terminal.command` handles signals only after the import.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.machinery import ModuleSpec, PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:  # Keep the import of this module fast: a command cannot handle Ctrl-C before the import ends.
    from types import ModuleType
    from typing import Optional, Sequence

    from fairseq_alma.cli.notebook import load_model, open_stream, read_run, score

if sys.platform == "win32":
    raise ImportError("fairseq_alma needs Linux or macOS; on Windows, use the Windows Subsystem for Linux")

__version__ = "0.3.0"
__all__ = ["load_model", "open_stream", "read_run", "register", "score"]

COMMANDS = {  # name of each entry point -> module with the ``main`` function of the command
    "alma_prep_text": "data_prep.text.command",
    "alma_prep_images": "data_prep.images",
    "alma_grow": "fairseq_alma.cli.grow",
    "alma_ensemble": "fairseq_alma.cli.ensemble",
    "alma_stream": "fairseq_alma.cli.stream",
    "alma_report": "fairseq_alma.cli.report",
    "alma_export": "fairseq_alma.cli.export",
    "alma_import": "fairseq_alma.cli.import_model",
    "alma_update": "fairseq_alma.cli.update",
}


def register() -> None:
    """Import all modules that register names with fairseq; a second call is a no-op."""
    for module in ("images.image_task", "models", "optim", "text.losses", "text.task"):
        importlib.import_module(f"fairseq_alma.{module}")


# The imports of these modules take a third of the import time of fairseq. fairseq calls their functions only for the
# metrics of audio tasks and of sentence classification.
_DEFERRED = ("sklearn", "sklearn.metrics", "scipy.stats")


class _DeferredModule(type(sys)):  # type: ignore[misc]
    """Placeholder for a module. Calling a function of the placeholder imports the module."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or f"{self.__name__}.{name}" in _DEFERRED:  # `from` then looks in sys.modules.
            raise AttributeError(name)
        return lambda *args, **kwargs: getattr(importlib.import_module(str(self.__name__)), name)(*args, **kwargs)


class _RegisterAfterFairseq:
    """Import hook that calls `register` once fairseq is imported and no import of this package is in progress."""

    depth = 0  # number of imports of this package in progress
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
            names = () if is_own else [name for name in _DEFERRED if name not in sys.modules]
            sys.modules.update({name: _DeferredModule(name) for name in names})
            self.depth += is_own
            try:
                with warnings.catch_warnings():
                    if not is_own:
                        warnings.filterwarnings("ignore", category=FutureWarning, module="fairscale")
                    execute(module)
            finally:
                self.depth -= is_own
                for name in names:
                    sys.modules.pop(name, None)
            self.is_due |= not is_own
            if self.is_due and not self.depth:
                self.is_due = False
                register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def __getattr__(name: str) -> object:
    """Return an entry point in `COMMANDS` or a function of `fairseq_alma.cli.notebook`; import its module if needed."""

    def start(argv: Optional[Sequence[str]] = None) -> Optional[int]:
        try:
            return importlib.import_module(COMMANDS[name]).main(argv)
        except KeyboardInterrupt:
            print("interrupted before the command started", file=sys.stderr)
            return 130

    if name in COMMANDS:
        return start
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("fairseq_alma.cli.notebook"), name)


sys.meta_path.insert(0, _RegisterAfterFairseq())
if "fairseq" in sys.modules:
    register()
