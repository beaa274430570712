"""The program behind ``alma-prep-text``: raw text to a stream of token files.

Read in this order: ``command`` with ``options`` (the whole course), then what it calls: ``source`` and ``document``
(input to documents), ``survey`` (first pass), ``deal`` (who goes where), ``writing`` (tokenizer and last pass) with
``encoder``, and ``pool``. What it shares with ``alma-prep-images`` stands beside this folder: ``build_folder`` (what
stands at ``--out``; all or nothing) and ``compression``.
"""
