"""Implementation of ``alma-prep-text``: convert raw text to a stream of token files.

Modules, in reading order: ``command`` (options, main program, worker processes), ``documents`` (reader of input files),
``steps`` (steps of the conversion), ``assignment`` (hashes, splits), ``cluster`` (several machines).
"""
