"""Streams and their files: the manifest, token files, tokenizers, images. No fairseq."""
