"""How models grow: gate trees, plans, and operations on plain tensors. No fairseq."""

EXPERT_METHODS = ("copy", "split", "scratch")
SELECTIONS = ("loss", "usage", "random")
"""How parents of new experts are chosen; see `tensors.select_experts`."""
