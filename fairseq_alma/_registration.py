"""Register the plugins with fairseq, as soon as fairseq itself is there.

``import fairseq`` takes seconds and prints warnings of its own, which commands that only touch files (preparing text,
printing a plan, a report) should not pay for. So importing this package does not import fairseq: it registers at once
where fairseq is loaded already (always so under ``--user-dir``), and otherwise right after fairseq has been imported.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:  # each command imports this before it can answer Ctrl-C
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Optional, Sequence

PLUGIN_PACKAGES = ("fairseq_alma.criterions", "fairseq_alma.models", "fairseq_alma.optim", "fairseq_alma.tasks")


def register() -> None:
    """Import every module that registers a name with fairseq; a second call does nothing."""
    for package in PLUGIN_PACKAGES:
        importlib.import_module(package)


class _RegisterAfterFairseq:
    """Find the module ``fairseq`` as Python would, and call `register` once it has been executed."""

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if fullname != "fairseq":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_when_fairseq_is_loaded() -> None:
    """Register now if fairseq is loaded, else when it gets loaded."""
    if "fairseq" in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _RegisterAfterFairseq())
