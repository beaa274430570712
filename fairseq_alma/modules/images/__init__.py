"""Layers and networks of image models."""
