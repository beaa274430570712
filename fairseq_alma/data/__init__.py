"""Read and write streams: manifest, token files, tokenizers, images. The package does not import fairseq."""
