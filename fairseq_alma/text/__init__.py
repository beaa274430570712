"""Train on text: task, batches, models and criterion for fairseq, and the stage steps of ``alma-stream``."""
