"""Folders of stock architectures of transformers, written and read. No fairseq.

- ``exportable``: which models can be exported
- ``export``, ``tokenizer_files``, ``model_card``: a checkpoint becomes a folder, written whole or not at all
- ``import_folder``: a folder becomes a checkpoint
- ``tensor_file``: files of safetensors
"""
