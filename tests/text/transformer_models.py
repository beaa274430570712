"""Small alma_transformer_lm models, without a stream behind them."""

import torch

from fairseq_alma.text.build_model import build_from_config
from tests.models.ensembles import alma_transformer_config


def config_of(**options):
    """Return ``cfg.model`` of a small model with two heads."""
    return alma_transformer_config(**{"decoder_layers": 4, "decoder_attention_heads": 2, **options})


def model_of(num_tokens=46, seed=0, is_random=False, **options):
    """Build a model, its weights as they begin, or all of them random, so that every part counts."""
    torch.manual_seed(seed)
    model = build_from_config(config_of(**options), num_tokens + 4, "cpu")
    if is_random:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model
