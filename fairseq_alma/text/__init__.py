"""Language: task, data, model, layers, criterion, and what trains and tests by fairseq's commands."""
