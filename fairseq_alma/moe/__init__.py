"""One mixture of experts, for tokens of text and for images.

- ``gate``: the gate, a tree of choices, and its decision (`Routing`)
- ``dispatch``: the tokens of each expert under a capacity; the losses of each expert
- ``switch_layer``: one expert for each token, computed one after the other (used by ``text``)
- ``mixture_layer``: all experts weighted, or one of them, for each image (used by ``images``)
"""
