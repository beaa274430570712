"""How models grow: gate trees, plans, and operations on plain tensors. No fairseq."""

EXPERT_METHODS = ("copy", "split", "scratch")
LAYER_METHODS = ("zero", "last", "interpolated")
SELECTIONS = ("loss", "usage", "worst", "random")
"""How parents of new experts are chosen; see `tensors.select_experts`."""
