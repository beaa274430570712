"""Mixtures of experts.

- ``gate``: gates (trees of nodes), assignment of tokens to experts of limited capacity, and the loss of each expert
- ``switch_layer``: one expert for each token of text (for images, see `images.mixtures`)
"""
