"""Model growth: gate trees, growth plans and operations on plain tensors. The package does not import fairseq."""

EXPERT_METHODS = ("copy", "split", "scratch")
SELECTIONS = ("loss", "usage", "random")
"""Criteria for selecting the experts to copy or split; see `tensors.select_experts`."""
