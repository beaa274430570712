"""Where the installed commands begin: before their own modules are imported, so that Ctrl-C then is no traceback.

Importing a command takes a quarter of a second; `entry.command` can answer only what happens after it.
"""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # nothing is imported here that takes time, as nobody answers Ctrl-C meanwhile
    from typing import Optional, Sequence


def prep_text(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Run ``alma-prep-text``."""
    return start("data_prep.text.command", argv)


def prep_images(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Run ``alma-prep-images``."""
    return start("data_prep.images.command", argv)


def grow(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Run ``alma-grow``."""
    return start("fairseq_alma.cli.grow", argv)


def ensemble(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Run ``alma-ensemble``."""
    return start("fairseq_alma.cli.ensemble", argv)


def stream(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Run ``alma-stream``."""
    return start("fairseq_alma.cli.stream", argv)


def report(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Run ``alma-report``."""
    return start("fairseq_alma.cli.report", argv)


def export(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Run ``alma-export``."""
    return start("fairseq_alma.cli.export", argv)


def import_model(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Run ``alma-import``."""
    return start("fairseq_alma.cli.import_model", argv)


def score(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Run ``alma-score``."""
    return start("fairseq_alma.cli.score", argv)


def generate(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Run ``alma-generate``."""
    return start("fairseq_alma.cli.generate", argv)


def verify(argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Run ``alma-verify``."""
    return start("fairseq_alma.cli.verify", argv)


def start(module: str, argv: Optional[Sequence[str]] = None) -> Optional[int]:
    """Import a module and run its ``main``; Ctrl-C meanwhile is one line and status 130, as afterwards.

    Args:
        module: name of the module.
        argv: what its ``main`` takes; None: the command line.

    Returns:
        Its exit status.
    """
    try:
        return importlib.import_module(module).main(argv)
    except KeyboardInterrupt:
        print("interrupted; nothing has begun", file=sys.stderr)
        return 130
    except (MemoryError, ImportError, RuntimeError, SystemError) as error:
        from fairseq_alma.errors import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        print("out of memory before anything has begun; give the command more", file=sys.stderr)
        return 1
