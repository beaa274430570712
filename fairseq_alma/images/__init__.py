"""Image classification: fairseq task and criterion, data, networks, and the loop that trains and tests models."""
