"""Implementation of ``alma-prep-text``: convert raw text to a stream of token files.

Modules, in reading order: ``command`` and ``options`` (main function and options), ``documents`` (input files and their
documents), ``steps`` with ``assignment`` and ``tokenizer`` (the algorithm), ``workers`` (processes on one machine),
``cluster`` (several machines).
"""
