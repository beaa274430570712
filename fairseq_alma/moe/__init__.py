"""One mixture of experts, for tokens of text and for images.

- ``gate``: the gate, a tree of choices, and its decision (`Routing`)
- ``dispatch``: which tokens an expert takes, under a capacity; the loss that each expert is responsible for
- ``experts``: the experts of a Switch layer, computed one after the other
- ``switch_layer``: one expert for each token (used by ``text``)
- ``mixture_layer``: all experts weighted, or one of them, for each image (used by ``images``)
"""
