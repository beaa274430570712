"""From raw text and published images to streams: the programs behind both prep commands, and scripts per corpus."""
