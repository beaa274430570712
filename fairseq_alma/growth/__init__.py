"""How models grow: gate trees, plans, and operations on plain tensors. No fairseq."""
