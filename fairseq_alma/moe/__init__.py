"""Mixtures of experts for tokens of text and for images.

- ``gate``: gates (trees of nodes), assignment of tokens to experts of limited capacity, and the loss of each expert
- ``switch_layer``: one expert for each token (used by ``text``)
- ``mixture_layer``: one expert or the weighted mean of all experts for each image (used by ``images``)
"""
