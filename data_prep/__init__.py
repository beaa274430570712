"""Implement ``alma-prep-text``, ``alma-prep-images`` and ``data_prep.corpus``: make streams of text or images."""
