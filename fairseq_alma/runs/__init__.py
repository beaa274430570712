"""Run Algorithm 1 of the paper for every learner, on text and on images: loop over stages, run folder, records."""
