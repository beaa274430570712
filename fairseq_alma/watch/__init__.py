"""What a user watches: the progress of a run on the terminal, its curves over arrivals in TensorBoard and W&B."""
