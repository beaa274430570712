"""Entry points of the installed commands. Each entry point handles Ctrl-C during the import of the command.

The import takes a quarter of a second. `terminal.command` handles signals only after the import.
"""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # The imports of this module must be fast.
    from typing import Callable, Optional, Sequence

COMMANDS = {
    "prep_text": "data_prep.text.command",
    "prep_images": "data_prep.images",
    "grow": "fairseq_alma.cli.grow",
    "ensemble": "fairseq_alma.cli.ensemble",
    "stream": "fairseq_alma.cli.stream",
    "report": "fairseq_alma.cli.report",
    "export": "fairseq_alma.cli.export",
    "import_model": "fairseq_alma.cli.import_model",
    "update": "fairseq_alma.cli.update",
}
"""Name of each entry point -> module with the ``main`` function of the command."""


def __getattr__(name: str) -> Callable[..., Optional[int]]:
    if name not in COMMANDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def start(argv: Optional[Sequence[str]] = None) -> Optional[int]:
        try:
            return importlib.import_module(COMMANDS[name]).main(argv)
        except KeyboardInterrupt:
            print("interrupted before the command started", file=sys.stderr)
            return 130

    return start
