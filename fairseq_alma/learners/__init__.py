"""Algorithm 1 of the paper, once, and the learners as strategies over it. No fairseq."""
