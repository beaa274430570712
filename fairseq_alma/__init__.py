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
- ``cli``: the ``alma-*`` commands
"""

from __future__ import annotations

from fairseq_alma.registration import register, register_when_loaded

TYPE_CHECKING = False
if TYPE_CHECKING:  # each command imports this before it can answer Ctrl-C
    from fairseq_alma.front_door import load_model, open_stream, read_run, score

__version__ = "0.2.0"
__all__ = ["load_model", "open_stream", "read_run", "register", "score"]

register_when_loaded()


def __getattr__(name: str) -> object:
    """Import what notebooks use when it is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fairseq_alma import front_door

    return getattr(front_door, name)
