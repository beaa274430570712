"""Layers of language models."""
