"""Show the progress of a run on the terminal, and write its results to TensorBoard and W&B."""
