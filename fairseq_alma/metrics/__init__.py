"""Figures of a run: perplexity and bits per byte, parameters and FLOPs, averages over arrivals. No fairseq."""
