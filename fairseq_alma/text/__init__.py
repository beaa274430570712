"""Training on text: task, batches, models and criterion for fairseq, and the steps of a stage of ``alma-stream``."""
