"""From raw text and published images to streams: the programs behind both prep commands, and a table of corpora."""
