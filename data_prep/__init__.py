"""Convert text or images to streams: ``alma-prep-text``, ``alma-prep-images`` and ``python -m data_prep.corpus``."""
