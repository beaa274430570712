"""Mixtures of experts.

- ``gate``: gate (tree of nodes), assignment of tokens to experts of limited capacity, and the loss of each expert
- ``switch_layer``: one expert for each token of text (for gates and layers of images, see `images.mixtures`)
"""
