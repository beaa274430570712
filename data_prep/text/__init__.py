"""Implementation of ``alma-prep-text``: convert raw text to a stream of token files.

Modules, in reading order: ``command`` and ``options`` (main function and options), ``source`` and ``documents`` (input
files and their documents), ``steps`` with ``assignment``, ``tokenizer`` and ``encoder`` (the algorithm), ``writing``
(output files), ``workers`` (processes on one machine), ``cluster`` (several machines).
"""
