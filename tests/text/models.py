"""Small language models of both architectures, without a stream."""

from types import SimpleNamespace

import torch
from fairseq.data import Dictionary

import fairseq_alma
from fairseq_alma.text.model import AlmaSwitchLM, AlmaSwitchLMConfig
from fairseq_alma.text.transformer_model import AlmaTransformerLM, AlmaTransformerLMConfig

fairseq_alma.register()


def dictionary_of(num_tokens):
    dictionary = Dictionary()
    for token in range(num_tokens):
        dictionary.add_symbol(f"token{token}")
    return dictionary


def config_of(**options):
    config = AlmaSwitchLMConfig(
        decoder_layers=4, decoder_embed_dim=16, decoder_ffn_embed_dim=32, decoder_attention_heads=2, dropout=0.0
    )
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


def transformer_of(num_tokens=46, seed=0, **options):
    """Return an alma_transformer_lm whose residual outputs are not zero, so that all of it matters."""
    torch.manual_seed(seed)
    config = AlmaTransformerLMConfig(
        **{"decoder_layers": 2, "decoder_embed_dim": 16, "decoder_attention_heads": 2, "num_experts": 4, **options}
    )
    config.tokens_per_sample, config.max_target_positions = 24, None
    config.finetune_from_model, config.restore_file = None, "checkpoint_last.pt"
    model = AlmaTransformerLM.build_model(config, SimpleNamespace(source_dictionary=dictionary_of(num_tokens)))
    for name, parameter in model.named_parameters():
        if name.endswith(AlmaTransformerLM.residual_outputs):
            torch.nn.init.normal_(parameter, std=0.3)
    return model
