"""The options of each architecture that is built from a checkpoint, as ``cfg.model`` has them: types and ranges.

Other architectures are refused: stock fairseq hands strings in the options of some to Python's ``eval``. Of
``transformer_lm`` those options are refused that it does so with. No fairseq here.
"""

from typing import Annotated, Any, Literal, Mapping, Optional

import msgspec
from msgspec import Meta, Struct

from fairseq_alma.checkpoints import JOINT_MODEL
from fairseq_alma.checkpoints.container import UnfitCheckpoint
from fairseq_alma.files import Sha256

ENSEMBLE_ARCH = "alma_ensemble"
Size = Annotated[int, Meta(ge=1, le=2**24)]
Share = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(ge=0, le=1e9)]
Cutoffs = Annotated[str, Meta(pattern=r"^\d{1,9}(,\d{1,9}){0,20}$")]
Place = Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
Trees = Annotated[str, Meta(max_length=2**26)]
Activation = Literal["relu", "gelu", "gelu_fast", "gelu_accurate", "tanh", "linear"]


class Transformer(Struct, kw_only=True):
    """What language models have in common; the defaults are for the options of a joint model's members."""

    activation_fn: Activation = "relu"
    dropout: Share = 0.1
    attention_dropout: Share = 0.0
    activation_dropout: Share = 0.0
    decoder_embed_dim: Size
    decoder_ffn_embed_dim: Size
    decoder_layers: Annotated[int, Meta(ge=1, le=10_000)]
    decoder_attention_heads: Size
    tokens_per_sample: Optional[Size] = None
    max_target_positions: Optional[Size] = None

    def __post_init__(self) -> None:
        if self.decoder_embed_dim % self.decoder_attention_heads:
            raise ValueError(f"{self.decoder_attention_heads} attention heads for {self.decoder_embed_dim} dimensions")


class SwitchOptions(Transformer, kw_only=True):
    """Options of ``alma_switch_lm``."""

    decoder_sinusoidal_pos: bool = False
    no_scale_embedding: bool = False
    num_experts: Size
    moe_freq: Annotated[int, Meta(ge=0, le=2**24)] = 2
    capacity_factor: Factor = 1.0
    eval_capacity_factor: Factor = 0.0
    balance_loss_weight: Factor = 0.01
    gate_trees: Optional[Trees] = None
    checkpoint_activations: bool = False
    compile: bool = False
    finetune_from_model: Optional[str] = None
    restore_file: Optional[str] = None


class TransformerLMOptions(Transformer, kw_only=True):
    """Options of stock ``transformer_lm``; what can only be None or False would be evaluated, or needs a cluster."""

    decoder_input_dim: Size
    decoder_output_dim: Size
    relu_dropout: Share = 0.0
    decoder_normalize_before: bool = False
    no_decoder_final_norm: bool = False
    adaptive_softmax_cutoff: Optional[Cutoffs] = None
    adaptive_softmax_dropout: Share = 0.0
    adaptive_softmax_factor: Annotated[float, Meta(ge=1, le=1e6)] = 4.0
    no_token_positional_embeddings: bool = False
    share_decoder_input_output_embed: bool = False
    character_embeddings: Literal[False] = False
    character_embedding_dim: Size = 4
    char_embedder_highway_layers: int = 2
    adaptive_input: bool = False
    adaptive_input_factor: Annotated[float, Meta(ge=1, le=1e6)] = 4.0
    adaptive_input_cutoff: Optional[Cutoffs] = None
    tie_adaptive_weights: bool = False
    tie_adaptive_proj: bool = False
    decoder_learned_pos: bool = False
    layernorm_embedding: bool = False
    no_scale_embedding: bool = False
    checkpoint_activations: bool = False
    offload_activations: bool = False
    decoder_layerdrop: Share = 0.0
    decoder_layers_to_keep: None = None
    quant_noise_pq: Share = 0.0
    quant_noise_pq_block_size: Size = 8
    quant_noise_scalar: Share = 0.0
    min_params_to_wrap: Annotated[int, Meta(ge=0, le=2**62)] = 0
    base_layers: Optional[Literal[0]] = 0
    scale_fc: Optional[bool] = False
    scale_attn: Optional[bool] = False
    scale_heads: Optional[bool] = False
    scale_resids: Optional[bool] = False
    decoder_xformers_att_config: None = None
    add_bos_token: bool = False
    tpu: Literal[False] = False


class ImageOptions(Struct, kw_only=True):
    """Options of all image models; one that is not given has the architecture's default."""

    width: Optional[Size] = None
    hidden_layers: Optional[Annotated[int, Meta(ge=1, le=10_000)]] = None
    channels: Optional[Size] = None
    layer_channels: Annotated[str, Meta(max_length=400)] = ""
    num_experts: Optional[Size] = None
    gate: Literal["soft", "hard"] = "soft"
    gate_trees: Optional[Trees] = None


class JointOptions(Struct, kw_only=True):
    """Options of ``alma_umix``; those of its members are one string, as on a command line."""

    num_members: Annotated[int, Meta(ge=1, le=10_000)]
    member_arch: Annotated[str, Meta(max_length=100)]
    member_options: Annotated[str, Meta(max_length=2**26)] = ""
    tokens_per_sample: Optional[Size] = None
    max_target_positions: Optional[Size] = None


class Member(Struct, kw_only=True):
    """One member of an ensemble: in a file of its own, or with its configuration, and its weights in ``model``."""

    weight: Share
    sha256: Sha256
    path: Optional[Place] = None
    absolute_path: Optional[Place] = None
    origin: Optional[Place] = None
    config: Optional[dict[str, Any]] = None

    def __post_init__(self) -> None:
        if (self.config is None) == (self.path is None) or (self.path is None) != (self.absolute_path is None):
            raise ValueError("a member has either a file or a configuration")


class EnsembleOptions(Struct, kw_only=True):
    """``cfg.model`` of an ensemble; see `ensemble_file`."""

    members: Annotated[list[Member], Meta(min_length=1, max_length=10_000)]
    vocab_size: Annotated[int, Meta(ge=0, le=2**31)] = 0
    num_classes: Annotated[int, Meta(ge=0, le=2**31)] = 0
    image_pixels: Annotated[int, Meta(ge=0, le=2**31)] = 0
    image_channels: Annotated[int, Meta(ge=0, le=2**31)] = 0

    def __post_init__(self) -> None:
        total = sum(member.weight for member in self.members)
        if not abs(total - 1) < 1e-6:
            raise ValueError(f"the weights of the members add up to {total:g}, not to 1")


SWITCH_SIZES: Mapping[str, Mapping[str, int]] = {
    "alma_switch_lm": {"layers": 6, "embed_dim": 512, "ffn_embed_dim": 2048, "attention_heads": 8},
    "alma_switch_lm_tiny": {"layers": 4, "embed_dim": 128, "ffn_embed_dim": 512, "attention_heads": 4},
    "alma_switch_lm_base": {"layers": 6, "embed_dim": 512, "ffn_embed_dim": 2048, "attention_heads": 8},
    "alma_switch_lm_large": {"layers": 12, "embed_dim": 768, "ffn_embed_dim": 3072, "attention_heads": 12},
}
"""Sizes of the decoder of each Switch language model by its name; the paper's base and large ones, and a small one."""
IMAGE_MODELS = ("alma_mlp", "alma_vgg", "alma_moe_mlp", "alma_moe_vgg", "alma_firefly_vgg")
_STOCK_SIZES = (
    "big wiki103 baevski_wiki103 gbw baevski_gbw gpt gpt2_small gpt2_tiny gpt2_medium gpt2_big gpt2_big_wide "
    "gpt2_bigger gpt3_small gpt3_medium gpt3_large gpt3_xl gpt3_2_7 gpt3_6_7 gpt3_13 gpt3_175"
)
TRANSFORMER_LMS = ("transformer_lm", *(f"transformer_lm_{size}" for size in _STOCK_SIZES.split()))
OPTIONS: Mapping[str, type[Struct]] = {
    **dict.fromkeys(SWITCH_SIZES, SwitchOptions),
    **dict.fromkeys(TRANSFORMER_LMS, TransformerLMOptions),
    **dict.fromkeys(IMAGE_MODELS, ImageOptions),
    JOINT_MODEL: JointOptions,
    ENSEMBLE_ARCH: EnsembleOptions,
}


def read_options(config: Any) -> Any:
    """Return ``cfg.model`` as the options of its architecture, with their types.

    Raises:
        UnfitCheckpoint: the architecture is none that is built from a file, or an option is none of its own.
    """
    name = config.get("_name") if isinstance(config, dict) else None
    if not isinstance(name, str) or name not in OPTIONS:
        raise UnfitCheckpoint(
            f"architecture {str(name)[:60]}, but models here are alma_… or transformer_lm…: {str(name)[:60]!r} cannot "
            "grow, and is not built from a file"
        )
    return convert_options(config, OPTIONS[name], name)


def convert_options(options: Mapping[str, Any], kind: type[Struct], name: str, strict: bool = True) -> Any:
    """Return options as their declared type; see `read_options`. From a command line (not ``strict``) they are text."""
    try:
        return msgspec.convert(options, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise UnfitCheckpoint(
            f"its configuration is no {name} that can be built: {str(error).replace('`', '')}"
        ) from error
