"""One mixture of experts, for tokens of text and for images; nothing here knows of either.

- ``gate``: the gate, a tree of choices, and its decision (`Routing`); two kernels compute it
- ``dispatch``: which tokens an expert takes, under a capacity; how much of the loss each is responsible for
- ``experts``: the experts of a Switch layer, and three ways to compute them
- ``expert_parallel``: the experts of a layer over several processes
- ``switch_layer``: one expert for each token (``text`` builds on it)
- ``mixture_layer``: all experts weighted, or one of them, for each image (``images`` builds on it)
"""
