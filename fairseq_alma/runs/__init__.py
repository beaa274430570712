"""Algorithm 1 of the paper, once, for every learner and both kinds of data: loop, run folder, records, displays."""
