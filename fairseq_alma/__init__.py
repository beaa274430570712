"""Anytime Learning at Macroscale for fairseq: streams of mega-batches, models that grow, ensembles.

Packages, each importing only what stands above it:

- ``metrics``, ``data``: figures and files; plain Python, NumPy and torch, no fairseq
- ``modules``: layers (Switch layer, attention)
- ``models``, ``criterions``, ``tasks``: what fairseq finds under their registered names
- ``learners``: Algorithm 1 and the strategies over it
- ``cli``: the ``alma-*`` commands
"""

from fairseq_alma._registration import register, register_when_fairseq_is_loaded

__version__ = "0.1.0"
__all__ = ["register"]

register_when_fairseq_is_loaded()
