"""Model growth: gate trees, growth plans and operations on plain tensors. The package does not import fairseq."""

EXPERT_METHODS = ("copy", "split", "scratch")
# Criteria for selecting the experts to copy or split; see `tensors.select_experts`.
SELECTIONS = ("loss", "usage", "random")
