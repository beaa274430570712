"""The program behind ``alma-prep-text``: raw text to a stream of token files.

Read in this order: ``command`` with ``options`` (the whole course), then what it calls: ``source``, ``pieces`` and
``document`` (input to documents), ``passes`` (a task for each piece, and what a killed command need not do again),
``survey`` (first pass), ``deal`` (who goes where), ``training`` (second pass: tokenizer, held-out n-grams), ``writing``
(last pass, and the sets) with ``encoder``, and ``pool``. What it shares with ``alma-prep-images`` stands beside this
folder: ``build_folder`` (what stands at ``--out``; all or nothing) and ``compression``.
"""
