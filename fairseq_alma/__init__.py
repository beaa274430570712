"""Anytime Learning at Macroscale for fairseq: streams of mega-batches, models that grow, ensembles.

Packages, each importing only what stands above it:

- ``metrics``, ``data``, ``growth``: figures, files, plain tensors; no fairseq
- ``learners``: Algorithm 1 and the strategies over it; no fairseq either, it starts fairseq's commands
- ``modules``: layers (Switch layer, attention)
- ``models``, ``criterions``, ``tasks``: what fairseq finds under their registered names
- ``evaluation``: measurements that fairseq has no command for
- ``report``: what the files of runs say, as tables, findings and figures; needs neither torch nor fairseq
- ``cli``: the ``alma-*`` commands
"""

from fairseq_alma._registration import register, register_when_fairseq_is_loaded

__version__ = "0.1.0"
__all__ = ["register"]

register_when_fairseq_is_loaded()
