"""The program ``alma-prep-text``: raw text to a stream of token files.

Order of reading: ``command``, ``options``; ``source`` and ``documents`` (from input to documents); ``steps`` with
``assignment``, ``tokenizer`` and ``encoder``; ``writing``; ``workers`` for one machine, ``cluster`` for several.
"""
