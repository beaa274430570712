"""From raw text to streams: the program behind ``alma-prep-text`` and scripts per corpus."""
