"""Streams and their files: the manifest, token files, tokenizers. No fairseq."""
