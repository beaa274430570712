"""Models that leave the house: folders that ``transformers`` reads, written and read. No fairseq.

- ``modeling_alma``: the models in ``transformers``' terms, one file that is copied into each folder
- ``model_folder``: a checkpoint becomes a folder, written whole or not at all
- ``exported_folder``: what a folder has to be before a model is built of it
- ``load_model``: a checkpoint or a folder as a model that writes text and scores documents
- ``member_weights``: names and sizes of a checkpoint's models, here and there
- ``import_folder``: a GPT-2 becomes a checkpoint
"""
