"""The program behind ``alma-prep-text``: raw text to a stream of token files.

In order of reading: ``command`` with ``options``; ``source`` and ``documents`` (from input to documents); ``steps``
(hash, cut, sample, encode) with ``assignment``, ``tokenizer``, ``encoder``; ``writing``; ``workers``, or ``cluster``
for many machines.
"""
