"""Algorithm 1 of the paper for every learner and both kinds of data: loop, run folder and records."""
