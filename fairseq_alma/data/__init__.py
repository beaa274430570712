"""Read and write streams: manifest, token files, tokenizers, images. Imports no fairseq."""
