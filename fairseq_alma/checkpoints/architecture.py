"""Architectures: the options of each as ``cfg.model`` has them, and whether weights are those of that model.

Other architectures are refused: stock fairseq hands strings in the options of some to Python's ``eval``. Of
``transformer_lm`` those options are refused that it does so with. And a configuration can announce ten million layers
in a few bytes: every size in it has to be found in the tensors, which take their place in the file. No fairseq here.
"""

import itertools
import shlex
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Callable, Literal, Mapping, Optional

import msgspec
from msgspec import Meta, Struct
from torch import Tensor, nn

from fairseq_alma.checkpoints import JOINT_MODEL, UnfitCheckpoint
from fairseq_alma.checkpoints import model_options as declared
from fairseq_alma.checkpoints.model_options import SWITCH_SIZES
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import Sha256
from fairseq_alma.growth.gate_tree import GateTree, parse_gate_trees, trees_of_layers
from fairseq_alma.options import options_of, struct_of

ENSEMBLE_ARCH = "alma_ensemble"
Size = Annotated[int, Meta(ge=1, le=2**24)]
Share = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(ge=0, le=declared.FACTOR.most)]
NumLayers = Annotated[int, Meta(ge=1, le=declared.LAYERS.most)]
Cutoffs = Annotated[str, Meta(pattern=r"^\d{1,9}(,\d{1,9}){0,20}$")]
Place = Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]


_Transformer: Any = struct_of(
    declared.TransformerOptions,
    declared.LengthOptions,
    required=("decoder_embed_dim", "decoder_ffn_embed_dim", "decoder_layers", "decoder_attention_heads"),
)


class Transformer(_Transformer):
    """What language models have in common; the defaults are for the options of a joint model's members."""

    def __post_init__(self) -> None:
        if self.decoder_embed_dim % self.decoder_attention_heads:
            raise ValueError(f"{self.decoder_attention_heads} attention heads for {self.decoder_embed_dim} dimensions")


_begun: Any = [(name, Optional[str], None) for name in declared.NO_BEGINNING]
_Begun: Any = msgspec.defstruct("_Begun", _begun, bases=(Transformer,), kw_only=True)
_SwitchOptions: Any = struct_of(declared.SwitchOptions, declared.ExpertOptions, base=_Begun, required=("num_experts",))


class SwitchOptions(_SwitchOptions):
    """Options of ``alma_switch_lm``."""

    decoder_layers_to_keep: None = None  # fairseq would look for numbers in it


_BegunAlone: Any = msgspec.defstruct("_BegunAlone", _begun, kw_only=True)
_ALMA_TRANSFORMER_OPTIONS = (declared.AlmaTransformerOptions, declared.ExpertOptions)
_AlmaTransformerOptions: Any = struct_of(
    *_ALMA_TRANSFORMER_OPTIONS,
    declared.LengthOptions,
    base=_BegunAlone,
    required=tuple(
        name for each in _ALMA_TRANSFORMER_OPTIONS for name, option in options_of(each).items() if option.shape
    ),
)


class AlmaTransformerOptions(_AlmaTransformerOptions):
    """Options of ``alma_transformer_lm``."""

    def __post_init__(self) -> None:
        if self.head_dim % 2 or self.decoder_attention_heads % self.num_kv_heads:
            raise ValueError("heads that are odd or do not divide")


class TransformerLMOptions(Transformer):
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


_ImageOptions: Any = struct_of(*declared.IMAGE_NETWORKS, declared.VGGVariantOptions, are_optional=True)


class ImageOptions(_ImageOptions):
    """Options of all image models; one that is not given has the architecture's default."""

    layer_channels: Annotated[str, Meta(max_length=8 * declared.LAYERS.most)] = ""
    group_layers: Annotated[str, Meta(max_length=40)] = ""


_JointOptions: Any = struct_of(declared.JointOptions, declared.LengthOptions, required=("num_members",))


class JointOptions(_JointOptions):
    """Options of ``alma_umix``; those of its members are one string, as on a command line."""

    member_arch: Annotated[str, Meta(max_length=100)]


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


_STOCK_SIZES = (
    "big wiki103 baevski_wiki103 gbw baevski_gbw gpt gpt2_small gpt2_tiny gpt2_medium gpt2_big gpt2_big_wide "
    "gpt2_bigger gpt3_small gpt3_medium gpt3_large gpt3_xl gpt3_2_7 gpt3_6_7 gpt3_13 gpt3_175"
)
TRANSFORMER_LMS = ("transformer_lm", *(f"transformer_lm_{size}" for size in _STOCK_SIZES.split()))


def read_options(config: Any) -> Any:
    """Return ``cfg.model`` as the options of its architecture, with their types.

    Raises:
        UnfitCheckpoint: the architecture is none that is built from a file, or an option is none of its own.
    """
    name = config.get("_name") if isinstance(config, dict) else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnfitCheckpoint(
            f"architecture {str(name)[:60]}, but models here are alma_… or transformer_lm…: {str(name)[:60]!r} cannot "
            "grow, and is not built from a file"
        )
    return convert_options(config, ARCHITECTURES[name].options, name)


def convert_options(options: Mapping[str, Any], kind: type[Struct], name: str, strict: bool = True) -> Any:
    """Return options as their declared type; see `read_options`. From a command line (not ``strict``) they are text."""
    try:
        return msgspec.convert(options, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise UnfitCheckpoint(
            f"its configuration is no {name} that can be built: {str(error).replace('`', '')}"
        ) from error


Weights = Mapping[str, Tensor]
Shapes = dict[str, tuple[int, ...]]

MAX_NESTING = 16
"""Ensembles within ensembles."""
_MAX_TABLE = 1 << 26  # numbers of sinusoidal positions, which stand in no file: 256 MiB
_POSITIONS = "decoder.embed_positions."
_LEFT_OUT = (".embed_positions._float_tensor", ".embed_positions.weights", "decoder.version")  # by fairseq too
EXTRA_POSITIONS = 2  # fairseq counts positions from behind the padding symbol's number
NUM_CONVOLUTIONS = 16  # of VGG19


@dataclass(frozen=True)
class Architecture:
    """All that is known of a model before it is built; an ensemble, or a joint model, is what its members are.

    Attributes:
        options: the type of ``cfg.model``.
        kind: ``text`` or ``images``; empty: its members say it.
        sizes: options that are a dimension of a weight, looked for before shapes are worked out.
        layers: the option that counts layers, and what stands before their numbers in the names of weights.
        shapes: returns names and shapes of all weights of a model of these options. What the options do not say, as the
            size of the vocabulary, it takes from the weights; and the members of a stack.
        is_whole: whether these are all weights that the model has.
    """

    options: type[Struct]
    kind: str = ""
    sizes: tuple[str, ...] = ()
    layers: Optional[tuple[str, str]] = None
    shapes: Callable[[Any, Weights, int], Shapes] = lambda options, weights, num_members: {}
    is_whole: bool = True

    def check(self, options: Any, weights: Weights, num_members: int = 1) -> None:
        """Raise UnfitCheckpoint unless weights are those of a model of these options, by name and shape."""
        if self.layers and getattr(options, self.layers[0]) is not None:
            _compare(self.layers[0], getattr(options, self.layers[0]), _num_children(weights, self.layers[1]))
        for name in self.sizes:
            if getattr(options, name) is not None:
                _look_for(name, getattr(options, name), weights)
        _check_experts(options, weights)
        needed = self.shapes(options, weights, num_members)
        found = {name: tensor.shape for name, tensor in weights.items() if self.is_whole or name in needed}
        if differing := other_shapes(found, needed):
            raise UnfitCheckpoint(differing)


def check_model(config: Any, weights: Weights, depth: int = 0) -> None:
    """Raise UnfitCheckpoint unless ``cfg.model`` is that of a known architecture, and ``model`` has its shapes.

    Args:
        config: ``cfg.model``.
        weights: ``model``, or the part of it that belongs to an embedded member.
        depth: ensembles around it.
    """
    options = read_options(config)
    if isinstance(options, EnsembleOptions):
        _check_ensemble(options, weights, depth)
    elif isinstance(options, JointOptions):
        _check_joint(options, weights)
    else:
        ARCHITECTURES[config["_name"]].check(options, weights)


def is_of_images(config: Mapping[str, Any]) -> bool:
    """Tell whether ``cfg.model`` is that of an image model, or of several."""
    if config["_name"] == ENSEMBLE_ARCH:
        return bool(config.get("num_classes"))
    name = config.get("member_arch") or config["_name"]
    return name in ARCHITECTURES and ARCHITECTURES[name].kind == "images"


def other_shapes(found: Mapping[str, Any], needed: Mapping[str, Any]) -> str:
    """Say how the shapes of a checkpoint's tensors differ from those of its model; empty if they do not.

    This is the one comparison: of a file that is read, of a model that loads it, of one that is trained on or grows.
    """
    found = {name: shape for name, shape in found.items() if name in needed or not name.endswith(_LEFT_OUT)}
    missing, left_over = sorted(needed.keys() - found.keys()), sorted(found.keys() - needed.keys())
    wrong = sorted(name for name in needed.keys() & found.keys() if tuple(needed[name]) != tuple(found[name]))
    for problem, names in (("lacks", missing), ("has beyond its configuration", left_over), ("has misshapen", wrong)):
        if names:
            shapes = f" ({tuple(found[names[0]])}, not {tuple(needed[names[0]])})" if names is wrong else ""
            return f"the checkpoint {problem} {len(names)} tensor(s), {names[0]} the first{shapes}"
    return ""


def refuse_other_shapes(weights: Weights, model: nn.Module, path: str, remedy: str) -> None:
    """Raise AlmaError unless weights have exactly the names and shapes of a model's, which may be on ``meta``."""
    shapes = ({name: tensor.shape for name, tensor in each.items()} for each in (weights, model.state_dict()))
    if differing := other_shapes(*shapes):
        raise AlmaError(f"{path}: {differing}; {remedy}")


def _check_ensemble(options: EnsembleOptions, weights: Weights, depth: int) -> None:
    if depth > MAX_NESTING:
        raise UnfitCheckpoint(f"ensembles of ensembles, more than {MAX_NESTING} deep")
    parts = _by_member(weights, "decoder.members.")
    for index, member in enumerate(options.members):
        if member.config is None:
            if depth:
                raise UnfitCheckpoint("an embedded ensemble refers to files; alma-ensemble embeds all of it")
            if index in parts:
                raise UnfitCheckpoint(
                    f"member {index} of the ensemble is in a file of its own, and has weights here too"
                )
        else:
            check_model(member.config, parts.get(index, {}), depth + 1)
    if parts.keys() - range(len(options.members)):
        raise UnfitCheckpoint(f"weights of member {max(parts)}, the ensemble has {len(options.members)} from 0")


def _check_joint(options: JointOptions, weights: Weights) -> None:
    if is_of_images({"_name": options.member_arch}):
        words = _member_options(options.member_options)
        member = convert_options(words, ImageOptions, options.member_arch, strict=False)
        parts = _by_member(weights, "network.networks.")  # mixtures, side by side; others are stacked
        if not parts:
            ARCHITECTURES[options.member_arch].check(member, weights, options.num_members)
            return
        networks = [{f"network.{name}": tensor for name, tensor in part.items()} for part in parts.values()]
    else:
        member = joint_member_options(options)
        networks = list(_by_member(weights, "decoder.members.").values())
    _compare("num_members", options.num_members, len(networks))
    for network in networks:
        ARCHITECTURES[options.member_arch].check(member, network)


def joint_member_options(options: JointOptions) -> SwitchOptions:
    """Return the options of the language models that were trained jointly.

    Raises:
        UnfitCheckpoint: they are of an architecture that cannot be a member.
    """
    words = _member_options(options.member_options)
    if options.member_arch not in SWITCH_SIZES:
        raise UnfitCheckpoint(f"members of architecture {options.member_arch!r}, which cannot be members")
    defaults = {f"decoder_{name}": size for name, size in SWITCH_SIZES[options.member_arch].items()}
    lengths = {name: getattr(options, name) for name in ("tokens_per_sample", "max_target_positions")}
    given = {"num_experts": 4, **defaults, **words, **lengths}
    return convert_options(given, SwitchOptions, options.member_arch, strict=False)


def _member_options(text: str) -> dict[str, Any]:
    """Read ``--name value``, ``--name=value`` and ``--flag``."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UnfitCheckpoint(f"options of its members cannot be read ({error})") from error
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            option, is_given, value = word[2:].partition("=")
            name = option.replace("-", "_")
            found[name] = value if is_given else True
        else:
            found[name] = word
    return found


def _by_member(weights: Weights, prefix: str) -> dict[int, dict[str, Tensor]]:
    """Return the weights of each member by its number, under their own names."""
    parts: dict[int, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        number, _, own = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and number.isdecimal() and len(number) <= 6:
            parts.setdefault(int(number), {})[own] = tensor
    rest = len(weights) - sum(map(len, parts.values()))
    if rest and parts:
        raise UnfitCheckpoint(f"{rest} tensor(s) in it belong to no member")
    return parts


def _switch_shapes(options: SwitchOptions, weights: Weights, num_members: int) -> Shapes:
    try:
        trees = {layer: tree for layer, tree in enumerate(trees_of_layers(options)) if tree is not None}
    except AlmaError as error:
        raise UnfitCheckpoint(str(error)) from error
    return switch_shapes(options, _find(weights, "decoder.embed_tokens.weight", 2).size(0), trees)


def switch_shapes(options: SwitchOptions, vocab_size: int, trees: Mapping[int, GateTree]) -> Shapes:
    """Return names and shapes of all weights of a Switch language model, the shared output projection included.

    Args:
        options: of the model.
        vocab_size: tokens, fairseq's four included.
        trees: of the gates, by the number of their layer.
    """
    dim, ffn = options.decoder_embed_dim, options.decoder_ffn_embed_dim
    shapes: Shapes = {
        "decoder.embed_tokens.weight": (vocab_size, dim),
        "decoder.output_projection.weight": (vocab_size, dim),
        **_affine("decoder.layer_norm", dim),
    }
    positions = _num_positions(options)
    if not options.decoder_sinusoidal_pos:
        shapes[f"{_POSITIONS}weight"] = (positions + EXTRA_POSITIONS, dim)
    elif (positions + EXTRA_POSITIONS) * dim > _MAX_TABLE:
        raise UnfitCheckpoint(f"sinusoidal positions of sequences of {positions:,} tokens take too much memory")
    for layer in range(options.decoder_layers):
        here = f"decoder.layers.{layer}."
        shapes |= _affine(f"{here}self_attn.qkv_proj", 3 * dim, dim) | _affine(f"{here}self_attn.out_proj", dim, dim)
        shapes |= _affine(f"{here}self_attn_layer_norm", dim) | _affine(f"{here}final_layer_norm", dim)
        if layer in trees:
            shapes[f"{here}switch.gate.weight"] = (trees[layer].num_rows, dim)
            stack, experts = f"{here}switch.experts.", trees[layer].num_experts
            shapes |= {f"{stack}fc1_weight": (experts, ffn, dim), f"{stack}fc1_bias": (experts, ffn)}
            shapes |= {f"{stack}fc2_weight": (experts, dim, ffn), f"{stack}fc2_bias": (experts, dim)}
        else:
            shapes |= _affine(f"{here}fc1", ffn, dim) | _affine(f"{here}fc2", dim, ffn)
    return shapes


def _alma_transformer_shapes(options: Any, weights: Weights, num_members: int) -> Shapes:
    try:
        trees = trees_of_layers(options) if options.num_experts > 1 else [None] * options.decoder_layers
    except AlmaError as error:
        raise UnfitCheckpoint(str(error)) from error
    vocab_size, dim = _find(weights, "decoder.embed_tokens.weight", 2).size(0), options.decoder_embed_dim
    ffn, head_dim = options.decoder_ffn_embed_dim, options.head_dim
    query_dim, kv_dim = options.decoder_attention_heads * head_dim, options.num_kv_heads * head_dim
    shapes: Shapes = {f"decoder.{name}.weight": (vocab_size, dim) for name in ("embed_tokens", "output_projection")}
    shapes["decoder.norm.weight"] = (dim,)
    for layer, tree in enumerate(trees):
        of_layer: Shapes = {
            "input_layernorm.weight": (dim,),
            "self_attn.q_proj.weight": (query_dim, dim),
            "self_attn.k_proj.weight": (kv_dim, dim),
            "self_attn.v_proj.weight": (kv_dim, dim),
            "self_attn.o_proj.weight": (dim, query_dim),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.k_norm.weight": (head_dim,),
            "post_attention_layernorm.weight": (dim,),
        }
        experts, ending = ((), ".weight") if tree is None else ((tree.num_experts,), "")
        into = "mlp." if tree is None else "mlp.experts."
        of_layer |= {f"{into}{name}_proj{ending}": (*experts, ffn, dim) for name in ("gate", "up")}
        of_layer[f"{into}down_proj{ending}"] = (*experts, dim, ffn)
        if tree is not None:
            of_layer["mlp.gate.weight"] = (tree.num_rows, dim)
        shapes |= {f"decoder.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def _affine(name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _trees(options: Any, num_layers: int, num_experts: int) -> list[GateTree]:
    """Return the gate's tree of each layer of experts."""
    try:
        return parse_gate_trees(options.gate_trees, num_layers, num_experts)
    except AlmaError as error:
        raise UnfitCheckpoint(str(error)) from error


def _num_positions(options: Transformer) -> int:
    positions = options.max_target_positions or options.tokens_per_sample
    if positions is None:
        raise UnfitCheckpoint("its configuration does not say how long sequences are (tokens_per_sample)")
    return positions


def _stock_shapes(options: TransformerLMOptions, weights: Weights, num_members: int) -> Shapes:
    """Return the table of positions of a stock model; fairseq compares the rest when it loads the weights."""
    positions = _num_positions(options)
    if options.decoder_learned_pos and not options.no_token_positional_embeddings:
        return {f"{_POSITIONS}weight": (positions + EXTRA_POSITIONS, options.decoder_embed_dim)}
    if (positions + EXTRA_POSITIONS) * options.decoder_embed_dim > _MAX_TABLE:
        raise UnfitCheckpoint(f"sinusoidal positions of sequences of {positions:,} tokens take too much memory")
    return {}


def _mlp_shapes(options: ImageOptions, weights: Weights, num_members: int) -> Shapes:
    depth = _num_children(weights, "network.layers.") - 1
    first = _find(weights, "network.layers.0.weight", 3)
    if options.hidden_layers is not None:
        _compare("hidden_layers", options.hidden_layers, depth)
    last = _find(weights, f"network.layers.{depth}.weight", 3)
    sizes = [first.size(2), *[options.width or first.size(1)] * depth, last.size(1)]
    shapes: Shapes = {}
    for layer, (before, after) in enumerate(itertools.pairwise(sizes)):
        shapes |= _stack(f"network.layers.{layer}", num_members, after, before)
    return shapes


def _vgg_shapes(options: ImageOptions, weights: Weights, num_members: int) -> Shapes:
    depth = sum(_numbers("group_layers", options.group_layers)) or NUM_CONVOLUTIONS
    if depth > declared.LAYERS.most:
        raise UnfitCheckpoint(f"group_layers {options.group_layers!r} in its configuration")
    first = _find(weights, "network.blocks.0.conv.weight", 5)
    channels = _numbers("layer_channels", options.layer_channels) or [options.channels or first.size(1)] * depth
    if len(channels) != depth:
        raise UnfitCheckpoint(f"layer_channels {options.layer_channels[:60]!r} in its configuration")
    shapes = _classifier_shapes(weights, num_members, channels[-1])
    for layer, (before, after) in enumerate(itertools.pairwise([first.size(2), *channels])):
        shapes |= _convolution(f"network.blocks.{layer}.", num_members, after, before)
    return shapes


def _numbers(name: str, text: Optional[str]) -> list[int]:
    """Return numbers with commas between them; none of an empty text."""
    words = [word.strip() for word in (text or "").split(",") if word]
    if not all(word.isdecimal() for word in words):
        raise UnfitCheckpoint(f"{name} {(text or '')[:60]!r} in its configuration")
    return [int(word) for word in words]


def _mixture_shapes(is_vgg: bool, options: ImageOptions, weights: Weights, num_members: int) -> Shapes:
    """Return those of a fully connected network or a VGG network of mixtures, of one member."""
    depth = NUM_CONVOLUTIONS if is_vgg else _num_children(weights, "network.blocks.")
    first = _find(weights, f"network.blocks.0.{'conv' if is_vgg else 'linear'}.weight", 5 if is_vgg else 3)
    experts, size, before = first.shape[:3]
    after = (options.channels if is_vgg else options.width) or size
    shapes = _classifier_shapes(weights, 1, after)
    for layer, tree in enumerate(_trees(options, depth, options.num_experts or experts)):
        here = f"network.blocks.{layer}."
        shapes |= _affine(f"{here}gate", tree.num_rows, before)
        shapes |= (
            _convolution(here, tree.num_experts, after, before)
            if is_vgg
            else _stack(f"{here}linear", tree.num_experts, after, before)
        )
        before = after
    return shapes


def _classifier_shapes(weights: Weights, num_members: int, inputs: int) -> Shapes:
    return _stack("network.classifier", num_members, _find(weights, "network.classifier.weight", 3).size(1), inputs)


def _stack(name: str, members: int, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (members, outputs, inputs), f"{name}.bias": (members, outputs)}


def _convolution(prefix: str, members: int, outputs: int, inputs: int) -> Shapes:
    norm = ("weight", "bias", "running_mean", "running_var")
    shapes: Shapes = {f"{prefix}norm.{name}": (members, outputs) for name in norm}
    return {f"{prefix}conv.weight": (members, outputs, inputs, 3, 3), **shapes}


def _check_experts(options: Any, weights: Weights) -> None:
    """Compare the number of experts with their stacks, and the length of the trees' text with the rows of the gates."""
    if not hasattr(options, "gate_trees"):
        return
    rows = [tensor.size(0) for name, tensor in weights.items() if name.endswith("gate.weight") and tensor.dim()]
    for name, tensor in weights.items():
        if rows and name.endswith(_STACKS) and "classifier" not in name and options.num_experts is not None:
            _compare("num_experts", options.num_experts, tensor.size(0) if tensor.dim() else 0)
    if len(options.gate_trees or "") > 1000 + 64 * sum(rows):
        raise UnfitCheckpoint(f"gate trees of {len(options.gate_trees):,} characters for gates of {sum(rows):,} rows")


_STACKS = (".switch.experts.fc1_weight", ".mlp.experts.gate_proj", ".linear.weight", ".conv.weight")


def _num_children(weights: Weights, prefix: str) -> int:
    """Return how many different names follow a prefix."""
    return len({name.removeprefix(prefix).partition(".")[0] for name in weights if name.startswith(prefix)})


def _find(weights: Weights, name: str, num_axes: int) -> Tensor:
    if name not in weights or weights[name].dim() != num_axes:
        raise UnfitCheckpoint(f"not the weights that its configuration describes: {name} is missing, or has other axes")
    return weights[name]


def _look_for(option: str, size: int, weights: Weights) -> None:
    if not any(size in tensor.shape for tensor in weights.values()):
        raise UnfitCheckpoint(f"its configuration has {option} = {size:,}, and no weight has that size")


def _compare(option: str, announced: int, found: int) -> None:
    if announced != found:
        raise UnfitCheckpoint(
            f"its weights are misshapen: {option} is {announced:,} in its configuration, {found:,} there"
        )


_TEXT_LAYERS = ("decoder_layers", "decoder.layers.")
_WIDTHS = ("decoder_embed_dim", "decoder_ffn_embed_dim")
_SWITCH = Architecture(SwitchOptions, "text", _WIDTHS, _TEXT_LAYERS, _switch_shapes)
_ALMA_TRANSFORMER = Architecture(AlmaTransformerOptions, "text", _WIDTHS, _TEXT_LAYERS, _alma_transformer_shapes)
_STOCK = Architecture(
    TransformerLMOptions,
    "text",
    (*_WIDTHS, "decoder_input_dim", "decoder_output_dim"),
    _TEXT_LAYERS,
    _stock_shapes,
    is_whole=False,
)
ARCHITECTURES: Mapping[str, Architecture] = {
    **dict.fromkeys(SWITCH_SIZES, _SWITCH),
    **dict.fromkeys(declared.TRANSFORMER_SIZES, _ALMA_TRANSFORMER),
    **dict.fromkeys(TRANSFORMER_LMS, _STOCK),
    "alma_mlp": Architecture(ImageOptions, "images", ("width",), None, _mlp_shapes),
    "alma_vgg": Architecture(ImageOptions, "images", ("channels",), None, _vgg_shapes),
    "alma_firefly_vgg": Architecture(ImageOptions, "images", ("channels",), None, _vgg_shapes),
    "alma_moe_mlp": Architecture(
        ImageOptions, "images", ("width",), ("hidden_layers", "network.blocks."), partial(_mixture_shapes, False)
    ),
    "alma_moe_vgg": Architecture(ImageOptions, "images", ("channels",), None, partial(_mixture_shapes, True)),
    JOINT_MODEL: Architecture(JointOptions),
    ENSEMBLE_ARCH: Architecture(EnsembleOptions),
}
"""Every model that is built from a file; an architecture is added here, and where its network is."""
