"""Where the installed commands begin: before their own modules are imported, so that Ctrl-C then is no traceback.

Importing a command takes a quarter of a second; `entry.command` can answer only what happens after it.
"""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # nothing is imported here that takes time, as nobody answers Ctrl-C meanwhile
    from typing import Callable, Optional, Sequence


COMMANDS = {
    "prep_text": "data_prep.text.command",
    "prep_images": "data_prep.images.command",
    "grow": "fairseq_alma.cli.grow",
    "ensemble": "fairseq_alma.cli.ensemble",
    "stream": "fairseq_alma.cli.stream",
    "report": "fairseq_alma.cli.report",
    "export": "fairseq_alma.cli.export",
    "import_model": "fairseq_alma.cli.import_model",
    "update": "fairseq_alma.cli.update",
}
"""Function of this module, as the installed commands name it -> module with the command's ``main``."""


def __getattr__(name: str) -> Callable[..., Optional[int]]:
    if name not in COMMANDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda argv=None: start(COMMANDS[name], argv)


def start(module: str, argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Import a module and run its ``main``; Ctrl-C meanwhile is one line and status 130, as afterwards."""
    try:
        return importlib.import_module(module).main(argv)
    except KeyboardInterrupt:
        print("interrupted; nothing has begun", file=sys.stderr)
        return 130
