"""Checkpoint files: reading, writing, joining, and the facts that can be read off them. No fairseq."""
