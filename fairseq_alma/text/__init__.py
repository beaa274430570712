"""Training on text: task, batches, models and criterion for fairseq, and the steps of ``alma-stream`` in each stage."""
