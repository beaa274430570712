"""Options of model architectures, of the starting checkpoint and of ``alma-grow``. No torch or fairseq imports."""

from dataclasses import MISSING, dataclass
from functools import partial
from typing import Optional

from fairseq_alma.checkpoints import LAST_CHECKPOINT
from fairseq_alma.growth import EXPERT_METHODS, SELECTIONS
from fairseq_alma.options import Options, integer, opt, real

MAX_EXPERTS = 10_000
MAX_SIZE = 1_000_000
SIZE = integer(1, MAX_SIZE)
LAYERS = integer(1, 1000)
_FREQUENCY = integer(0, MAX_SIZE)
USUAL_FREQUENCY = 2  # Default MoE frequency: every second layer is a Switch layer.
SHARE, FACTOR = real(0, 1), real(0, 1e6)
TEXT, IMAGES = ("text",), ("images",)
of_text, shape_of_text = partial(opt, kinds=TEXT), partial(opt, kinds=TEXT, shape=True)
shape_of_images = partial(opt, kinds=IMAGES, shape=True)
# Decoder sizes of the Switch language models; the paper uses the sizes base and large.
SWITCH_SIZES = {
    "alma_switch_lm": {"layers": 6, "embed_dim": 512, "ffn_embed_dim": 2048, "attention_heads": 8},
    "alma_switch_lm_tiny": {"layers": 4, "embed_dim": 128, "ffn_embed_dim": 512, "attention_heads": 4},
    "alma_switch_lm_base": {"layers": 6, "embed_dim": 512, "ffn_embed_dim": 2048, "attention_heads": 8},
    "alma_switch_lm_large": {"layers": 12, "embed_dim": 768, "ffn_embed_dim": 3072, "attention_heads": 12},
}
# Decoder sizes of the ``alma_transformer_lm`` models; `train_options.complete_sizes` computes the remaining sizes.
TRANSFORMER_SIZES = {
    "alma_transformer_lm": {"layers": 8, "embed_dim": 512},
    "alma_transformer_lm_tiny": {"layers": 2, "embed_dim": 64},
    "alma_transformer_lm_mini": {"layers": 4, "embed_dim": 128},
    "alma_transformer_lm_small": {"layers": 6, "embed_dim": 256},
    "alma_transformer_lm_base": {"layers": 8, "embed_dim": 512},
    "alma_transformer_lm_large": {"layers": 16, "embed_dim": 1024},
}


@dataclass(frozen=True)
class SwitchOptions(Options):
    """Options of ``alma_switch_lm``. Most options have the same name in fairseq's ``transformer_lm``."""

    activation_fn: str = shape_of_text(
        "relu",
        "activation function of FFN layers and experts",
        choices=("relu", "gelu", "gelu_fast", "gelu_accurate", "tanh", "linear"),
    )
    dropout: float = of_text(0.1, "dropout probability", range=SHARE)
    attention_dropout: float = of_text(0.0, "dropout probability of attention weights", range=SHARE)
    activation_dropout: float = of_text(
        0.0, "dropout probability after the activation in FFN layers and experts", range=SHARE
    )
    decoder_embed_dim: int = shape_of_text(512, "model dimension", range=SIZE)
    decoder_ffn_embed_dim: int = shape_of_text(2048, "hidden size of FFN layers and experts", range=SIZE)
    decoder_layers: int = shape_of_text(6, "number of layers", range=LAYERS)
    decoder_attention_heads: int = shape_of_text(8, "number of attention heads", range=SIZE)
    decoder_sinusoidal_pos: bool = shape_of_text(False, "use sinusoidal instead of learned positional embeddings")
    no_scale_embedding: bool = shape_of_text(False, "do not scale embeddings by the square root of the model dimension")
    moe_freq: int = shape_of_text(
        USUAL_FREQUENCY, "make every n-th FFN layer a Switch layer; 0: no Switch layer", range=_FREQUENCY
    )


@dataclass(frozen=True)
class ExpertOptions(Options):
    """Options common to ``alma_switch_lm`` and ``alma_transformer_lm``."""

    num_experts: Optional[int] = shape_of_text(
        None,
        "experts per Switch layer; 1: dense model (default: value of the starting checkpoint, else 4 for "
        "alma_switch_lm and 1 for alma_transformer_lm)",
        range=integer(1, MAX_EXPERTS),
    )
    capacity_factor: float = of_text(
        1.0, "maximum tokens per expert in training, as a multiple of tokens / experts; 0: no limit", range=FACTOR
    )
    eval_capacity_factor: float = of_text(
        0.0, "maximum tokens per expert in evaluation, as a multiple of tokens / experts; 0: no limit", range=FACTOR
    )
    balance_loss_weight: float = of_text(
        0.01, "weight of the summed load-balancing losses of all Switch layers", range=FACTOR
    )
    gate_trees: Optional[str] = shape_of_text(
        None,
        "gate tree of each Switch layer, as JSON printed by alma-grow; empty: flat (default: value of the starting "
        "checkpoint, else flat)",
    )
    checkpoint_activations: bool = of_text(False, "recompute layers in the backward pass to save memory")
    compile: bool = of_text(
        False,
        "compile model and criterion with torch.compile for training; each expert layer is a graph break; needs g++, "
        "and Triton on a GPU",
    )


@dataclass(frozen=True)
class AlmaTransformerOptions(Options):
    """Options of ``alma_transformer_lm`` in addition to `ExpertOptions`.

    If an option that sets tensor shapes is not given, the value comes from the starting checkpoint. Without a starting
    checkpoint, the default value applies.
    """

    dropout: float = of_text(0.0, "dropout probability of embeddings and residual branches", range=SHARE)
    decoder_layers: Optional[int] = shape_of_text(None, "number of layers (default: set by --arch)", range=LAYERS)
    decoder_embed_dim: Optional[int] = shape_of_text(None, "model dimension (default: set by --arch)", range=SIZE)
    decoder_ffn_embed_dim: Optional[int] = shape_of_text(
        None, "hidden size of FFN layers and experts (default: 8/3 of the model dimension)", range=SIZE
    )
    decoder_attention_heads: Optional[int] = shape_of_text(
        None, "number of query heads (default: model dimension / --head-dim, else / 64, at least 2)", range=SIZE
    )
    num_kv_heads: Optional[int] = shape_of_text(
        None,
        "number of key-value heads; must divide the number of query heads (default: number of query heads)",
        range=SIZE,
    )
    head_dim: Optional[int] = shape_of_text(
        None, "dimension of a head, even (default: the model dimension / number of heads)", range=SIZE
    )
    rope_theta: Optional[float] = shape_of_text(
        None, "base of the frequencies of rotary embeddings (default: 10000)", range=real(1, 1e12)
    )
    norm_eps: Optional[float] = shape_of_text(None, "epsilon of RMS norms (default: 1e-6)", range=real(0, 1))
    no_embedding_norm: bool = shape_of_text(False, "omit the norm after the embeddings")
    share_decoder_input_output_embed: bool = shape_of_text(
        False, "use the input embeddings as output projection; increases the perplexity of small models"
    )
    moe_freq: Optional[int] = shape_of_text(
        None, "with --num-experts: make every n-th FFN layer a Switch layer (default: 2)", range=_FREQUENCY
    )
    symbol_ids: Optional[str] = shape_of_text(
        None, "token ids of <s>, <pad>, </s> and <unk> in an imported vocabulary, as JSON written by alma-import"
    )


@dataclass(frozen=True)
class LengthOptions(Options):
    """Options for the sequence length, common to the text task and language models."""

    tokens_per_sample: Optional[int] = of_text(None, "sequence length, in tokens", range=SIZE)
    max_target_positions: Optional[int] = of_text(None, "maximum sequence length of the model, in tokens", range=SIZE)


@dataclass(frozen=True)
class JointOptions(Options):
    """Options of ``alma_umix``: several models that are trained jointly."""

    num_members: int = opt(2, "number of jointly trained models", range=integer(1, 10_000), shape=True)
    member_arch: str = opt("alma_mlp", "architecture of each member", shape=True)
    member_options: str = opt("", "model options, the same for all members, as a string such as '--width 64'")
    joint_logits: str = opt("mean", "how the members' logits are combined", choices=("mean", "sum"), shape=True)


@dataclass(frozen=True)
class MLPOptions(Options):
    """Options of fully connected image networks."""

    width: int = shape_of_images(64, "number of neurons in each hidden layer or expert (paper: 4 to 64)", range=SIZE)
    hidden_layers: int = shape_of_images(2, "number of hidden layers", range=LAYERS)


@dataclass(frozen=True)
class VGGOptions(Options):
    """Options of VGG networks."""

    channels: int = shape_of_images(
        32, "number of feature maps in each layer or expert before growth (paper: 4 to 64)", range=SIZE
    )
    # The paper does not specify the other options.
    last_pool: str = shape_of_images(
        "mean", "final pooling over the image: mean, or max as in the paper's released code", choices=("mean", "max")
    )
    initial_weights: str = shape_of_images(
        "he", "initial weights of convolutions: he (He et al. 2015) or default (of torch)", choices=("he", "default")
    )


@dataclass(frozen=True)
class GrownVGGOptions(Options):
    """Options of VGG networks whose layers grow (``alma_firefly_vgg``)."""

    layer_channels: str = shape_of_images(
        "", "comma-separated numbers of feature maps, one per layer, set by growth; empty: --channels for each layer"
    )


@dataclass(frozen=True)
class MixtureOptions(Options):
    """Options of image models with mixtures of experts."""

    num_experts: int = shape_of_images(1, "experts per mixture layer before growth", range=integer(1, MAX_EXPERTS))
    gate: str = shape_of_images(
        "soft",
        "soft: weighted mean of all experts; hard: one expert (training: sampled; evaluation: greedy path of the gate)",
        choices=("soft", "hard"),
    )
    gate_trees: str = shape_of_images("", "gate tree of each mixture layer as JSON, set by growth; empty: flat gates")


LANGUAGE = (SwitchOptions, ExpertOptions)
ALMA_TRANSFORMER = (AlmaTransformerOptions, ExpertOptions)
IMAGE_NETWORKS = (MLPOptions, VGGOptions, GrownVGGOptions, MixtureOptions)


@dataclass(frozen=True, kw_only=True)
class GrowOptions(Options):
    """Options of ``alma-grow``: one growth step of a language model."""

    path: str = opt(MISSING, "run or checkpoint to grow (alma_transformer_lm or alma_switch_lm)", metavar="CKPT")
    out: str = opt(MISSING, "checkpoint to write", metavar="CKPT")
    method: Optional[str] = opt(
        None, "copy experts, split experts (the loss does not change), or add random experts", choices=EXPERT_METHODS
    )
    experts: Optional[int] = opt(
        None, "experts to add to each Switch layer", range=integer(1, MAX_EXPERTS), metavar="K"
    )
    moe_freq: Optional[int] = opt(
        None,
        "for a dense model with --experts: make every n-th FFN layer a Switch layer (default: value of the checkpoint)",
        range=_FREQUENCY,
    )
    layers: Optional[int] = opt(
        None, "new number of decoder layers; new layers output zero, so the loss does not change", range=LAYERS
    )
    select: str = opt(
        "loss", "experts to copy or split: largest summed loss, most tokens, or random", choices=SELECTIONS
    )
    stream: Optional[str] = opt(
        None, "stream for measuring the loss of each expert (default: training stream of the model)", metavar="STREAM"
    )
    split: str = opt("valid", "held-out split for measuring the loss of each expert", metavar="SPLIT")
    noise: Optional[float] = opt(
        None,
        "with --method copy: standard deviation of noise added to copied gate rows (default: 0; for a dense model, 0.1 "
        "/ square root of the model dim)",
        range=real(0, 1e6),
        metavar="X",
    )
    optimizer: str = opt(
        "reset",
        "optimizer state: reset, copy, or share between the halves of a split expert",
        choices=("reset", "copy", "share"),
    )
    batch_size: int = opt(16, "sequences per batch for measuring the loss of each expert", range=integer())
    tokens_per_sample: Optional[int] = opt(None, "tokens per sequence (default: value used in training)", range=SIZE)
    seed: int = opt(1, "random seed of new weights, noise and random selection", range=integer(0, 2**63 - 1))
    cpu: bool = opt(False, "use the CPU even if a GPU is available")
    force: bool = opt(False, "replace --out if it exists")


@dataclass
class StartOptions:
    """Options for the starting checkpoint: ``finetune_from_model`` (weights only), ``restore_file`` (all state)."""

    finetune_from_model: Optional[str] = "${checkpoint.finetune_from_model}"
    restore_file: str = "${checkpoint.restore_file}"


# Option of fairseq-train that loads only the weights of a checkpoint.
WEIGHTS_FLAG = "--finetune-from-model"
# Default `StartOptions`, with which fairseq-train resumes from the last checkpoint.
DEFAULT_START = {"finetune_from_model": None, "restore_file": LAST_CHECKPOINT}
