"""Small language models of both architectures, without a stream."""

from types import SimpleNamespace

import torch
from fairseq.data import Dictionary

import fairseq_alma
from fairseq_alma.checkpoints.model_options import DEFAULT_START
from fairseq_alma.text.switch_lm import AlmaSwitchLM, AlmaSwitchLMConfig
from fairseq_alma.text.train_options import complete_sizes
from fairseq_alma.text.transformer_lm import AlmaTransformerLMConfig, build_from_config

fairseq_alma.register()


def dictionary_of(num_tokens):
    dictionary = Dictionary()
    for token in range(num_tokens):
        dictionary.add_symbol(f"token{token}")
    return dictionary


def config_of(**options):
    sizes = {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 32, "decoder_attention_heads": 2}
    config = AlmaSwitchLMConfig(decoder_layers=4, dropout=0.0, **sizes)
    config.tokens_per_sample = 24
    config.max_target_positions = None
    config.finetune_from_model, config.restore_file = None, "checkpoint_last.pt"
    config.num_experts, config.gate_trees = 4, ""
    for name, value in options.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    return config


def model_of(num_tokens=46, seed=0, **options):
    torch.manual_seed(seed)
    return AlmaSwitchLM.build_model(config_of(**options), SimpleNamespace(source_dictionary=dictionary_of(num_tokens)))


def transformer_config(**options):
    """Return ``cfg.model`` of a small alma_transformer_lm, as a checkpoint has it."""
    config = {**vars(AlmaTransformerLMConfig()), "decoder_embed_dim": 16, "decoder_attention_heads": 2, **options}
    complete_sizes(config, "alma_transformer_lm_tiny")
    lengths = {"tokens_per_sample": 24, "max_target_positions": None}
    return {**config, **lengths, **DEFAULT_START, "_name": "alma_transformer_lm_tiny"}


def transformer_of(num_tokens=46, seed=0, is_fresh=False, **options):
    """Return an alma_transformer_lm, with random numbers added to all weights unless it is fresh."""
    torch.manual_seed(seed)
    model = build_from_config(transformer_config(**options), num_tokens + 4, str(torch.get_default_device()))
    with torch.no_grad():
        for parameter in () if is_fresh else model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model
