"""Implementation of Algorithm 1 of the paper: options of ``alma-stream``, loop over stages, run folder with records."""
