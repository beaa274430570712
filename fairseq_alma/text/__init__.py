"""Text: task, data, models, criterion, and the steps of a stage, which are fairseq's commands."""
