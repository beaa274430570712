"""The program behind ``alma-prep-text``: raw text to a stream of token files.

Read in this order: ``command`` with ``options`` (the whole course), then what it calls: ``source`` and ``pieces``
(input to documents), ``passes`` (what a step is, and what a killed command need not do again), ``buckets`` (first
pass) and ``deal`` (who goes where), ``training`` (second pass: tokenizer, held-out n-grams), ``encoding`` (last pass,
and the sets), and ``pool``.
What it shares with ``alma-prep-images`` stands beside this folder: ``build_folder`` (what stands at ``--out``; all or
nothing) and ``compression``.
"""
