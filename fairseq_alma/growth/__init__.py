"""Model growth: gate trees, growth plans and operations on plain tensors. No fairseq imports."""

EXPERT_METHODS = ("copy", "split", "scratch")
SELECTIONS = ("loss", "usage", "random")
"""How the parents of new experts are selected; see `tensors.select_experts`."""
