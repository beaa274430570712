"""Models that leave the house: folders that ``transformers`` reads, written and read. No fairseq.

- ``modeling_alma``: the models in ``transformers``' terms, one file that is copied into each folder
- ``model_folder``: a checkpoint becomes a folder, written whole or not at all
- ``member_weights``: names and sizes of a checkpoint's models, here and there
- ``tokenizer_files``: a stream's tokenizer with fairseq's ids
"""
