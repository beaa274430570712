"""Language models, through fairseq's own commands in processes, and growth between stages."""
