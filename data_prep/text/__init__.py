"""The program behind ``alma-prep-text``: raw text to a stream of token files.

Read in this order: ``command`` (options), ``prepare`` (the whole course), then what it calls: ``source`` and
``document`` (input to documents), ``survey`` (first pass), ``deal`` (who goes where), ``training`` (tokenizer),
``encoder`` and ``writing`` (last pass), ``pool`` and ``progress``. What it shares with ``alma-prep-images`` stands
beside this folder: ``build_folder`` (what stands at ``--out``; all or nothing), ``compression``.
"""
