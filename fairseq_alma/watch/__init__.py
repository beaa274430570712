"""Show the progress of a run on the terminal, and write the results to TensorBoard and W&B."""
