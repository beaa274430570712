"""Checkpoints of small untrained language models, and ensembles of them, without a stream."""

from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq import models
from fairseq.models import MODEL_DATACLASS_REGISTRY
from omegaconf import OmegaConf

from fairseq_alma.checkpoints.checkpoint_file import DICTIONARY_KEY, read_checkpoint, write_checkpoint
from fairseq_alma.checkpoints.ensemble_file import join_checkpoints
from tests.text.models import config_of, dictionary_of

NUM_TOKENS = 46  # without fairseq's four symbols


def task_of(path=None, num_tokens=NUM_TOKENS):
    dictionary, path = dictionary_of(num_tokens), path and str(path)
    return SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary, checkpoint_path=path)


def switch_config(**options):
    return {**vars(config_of(**options)), "_name": "alma_switch_lm"}


def transformer_config():
    """Return the configuration of a stock fairseq model."""
    config = vars(MODEL_DATACLASS_REGISTRY["transformer_lm"]())
    small = {"decoder_layers": 1, "decoder_embed_dim": 16, "decoder_ffn_embed_dim": 32, "decoder_attention_heads": 2}
    elsewhere = {"tokens_per_sample": 24, "max_target_positions": None, "add_bos_token": False, "tpu": False}
    settings = {**small, **elsewhere, "share_decoder_input_output_embed": True, "_name": "transformer_lm"}
    return {**config, **settings, "decoder_input_dim": 16, "decoder_output_dim": 16}


def save_member(path, config, seed, dictionary="d" * 64, num_tokens=NUM_TOKENS):
    """Write the checkpoint of an untrained model; return the path."""
    torch.manual_seed(seed)
    weights = models.build_model(OmegaConf.create(config), task_of(num_tokens=num_tokens)).state_dict()
    state = {} if dictionary is None else {DICTIONARY_KEY: dictionary}
    cfg = {"model": config, "task": {"_name": "alma_lm"}}
    write_checkpoint({"cfg": cfg, "model": weights, "task_state": state}, path)
    return path


def save_ensemble(out, paths, weights=None, embed=False):
    """Write the checkpoint of an ensemble; return the path."""
    write_checkpoint(join_checkpoints(paths, weights or [1.0] * len(paths), out, embed), out)
    return out


def load(path: Path, num_tokens=NUM_TOKENS):
    """Load a checkpoint's model as fairseq's commands do."""
    checkpoint = read_checkpoint(path)
    config = OmegaConf.create(checkpoint["cfg"]["model"])
    model = models.build_model(config, task_of(path, num_tokens), from_checkpoint=True)
    model.load_state_dict(checkpoint["model"], strict=True, model_cfg=config)
    return model.eval()
