"""Whether a checkpoint's weights are those of the model that its ``cfg.model`` describes, before anything is built.

A configuration can announce ten million layers in a few bytes. Every size in it has to be found in the tensors, which
take their place in the file. No fairseq here.
"""

import shlex
from typing import Any, Mapping

from torch import Tensor

from fairseq_alma.checkpoints.container import UnfitCheckpoint
from fairseq_alma.checkpoints.model_options import (
    IMAGE_MODELS,
    SWITCH_SIZES,
    EnsembleOptions,
    ImageOptions,
    JointOptions,
    SwitchOptions,
    Transformer,
    TransformerLMOptions,
    convert_options,
    read_options,
)
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree, parse_gate_trees

Weights = Mapping[str, Tensor]
Shapes = dict[str, tuple[int, ...]]

MAX_NESTING = 16
"""Ensembles within ensembles."""
_MAX_TABLE = 1 << 26  # numbers of sinusoidal positions, which stand in no file: 256 MiB
_POSITIONS = "decoder.embed_positions."
_IGNORED = (f"{_POSITIONS}_float_tensor", f"{_POSITIONS}weights", "decoder.version")  # as fairseq does
EXTRA_POSITIONS = 2  # fairseq counts positions from behind the padding symbol's number


def check_model(config: Any, weights: Weights, depth: int = 0) -> None:
    """Raise UnfitCheckpoint unless ``cfg.model`` is that of a known architecture, and ``model`` has its sizes.

    Args:
        config: ``cfg.model``.
        weights: ``model``, or the part of it that belongs to an embedded member.
        depth: ensembles around it.
    """
    options = read_options(config)
    if isinstance(options, SwitchOptions):
        _check_switch(options, weights)
    elif isinstance(options, TransformerLMOptions):
        _check_transformer(options, weights)
    elif isinstance(options, ImageOptions):
        _check_image_model(options, weights)
    elif isinstance(options, JointOptions):
        _check_joint(options, weights)
    else:
        _check_ensemble(options, weights, depth)


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
    words = _member_options(options.member_options)
    if options.member_arch in IMAGE_MODELS:
        _check_image_model(
            convert_options(words, ImageOptions, options.member_arch, strict=False), weights, options.num_members
        )
        return
    member = joint_member_options(options)
    parts = _by_member(weights, "decoder.members.")
    _compare("num_members", options.num_members, len(parts))
    for part in parts.values():
        _check_switch(member, part)


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
    return parts


def _check_switch(options: SwitchOptions, weights: Weights) -> None:
    """Compare all names and shapes of a Switch language model."""
    embeddings = _find(weights, "decoder.embed_tokens.weight")
    _compare("decoder_layers", options.decoder_layers, _num_children(weights, "decoder.layers."))
    _check_experts(options, weights, ".switch.experts.fc1_weight")
    if options.decoder_sinusoidal_pos:
        _check_table(options)
    needed = switch_shapes(options, embeddings.size(0))
    found = {name: tuple(tensor.shape) for name, tensor in weights.items() if name not in _IGNORED}
    if differing := other_shapes(found, needed):
        raise UnfitCheckpoint(differing)


def other_shapes(found: Mapping[str, Any], needed: Mapping[str, Any]) -> str:
    """Say how the shapes of a checkpoint's tensors differ from those of its model; empty if they do not."""
    missing, left_over = sorted(needed.keys() - found.keys()), sorted(found.keys() - needed.keys())
    wrong = sorted(name for name in needed.keys() & found.keys() if tuple(needed[name]) != tuple(found[name]))
    for problem, names in (("lacks", missing), ("has beyond its configuration", left_over), ("has misshapen", wrong)):
        if names:
            shapes = f" ({tuple(found[names[0]])}, not {tuple(needed[names[0]])})" if names is wrong else ""
            return f"the checkpoint {problem} {len(names)} tensor(s), {names[0]} the first{shapes}"
    return ""


def switch_shapes(options: SwitchOptions, vocab_size: int) -> Shapes:
    """Return names and shapes of all weights of a Switch language model, the shared output projection included."""
    dim, ffn, experts = options.decoder_embed_dim, options.decoder_ffn_embed_dim, options.num_experts
    shapes: Shapes = {
        "decoder.embed_tokens.weight": (vocab_size, dim),
        "decoder.output_projection.weight": (vocab_size, dim),
        **_affine("decoder.layer_norm", dim),
    }
    positions = options.max_target_positions or options.tokens_per_sample
    if not options.decoder_sinusoidal_pos:
        if positions is None:
            raise UnfitCheckpoint("its configuration does not say how long sequences are (tokens_per_sample)")
        shapes[f"{_POSITIONS}weight"] = (positions + EXTRA_POSITIONS, dim)
    trees = _trees(options, [layer for layer in range(options.decoder_layers) if _is_switch(options, layer)])
    for layer in range(options.decoder_layers):
        here = f"decoder.layers.{layer}."
        shapes |= _affine(f"{here}self_attn.qkv_proj", 3 * dim, dim) | _affine(f"{here}self_attn.out_proj", dim, dim)
        shapes |= _affine(f"{here}self_attn_layer_norm", dim) | _affine(f"{here}final_layer_norm", dim)
        if layer in trees:
            shapes[f"{here}switch.gate.weight"] = (trees[layer].num_rows, dim)
            stack = f"{here}switch.experts."
            shapes |= {f"{stack}fc1_weight": (experts, ffn, dim), f"{stack}fc1_bias": (experts, ffn)}
            shapes |= {f"{stack}fc2_weight": (experts, dim, ffn), f"{stack}fc2_bias": (experts, dim)}
        else:
            shapes |= _affine(f"{here}fc1", ffn, dim) | _affine(f"{here}fc2", dim, ffn)
    return shapes


def _is_switch(options: SwitchOptions, layer: int) -> bool:
    return options.moe_freq > 0 and (layer + 1) % options.moe_freq == 0


def _affine(name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _trees(options: Any, layers: list[int]) -> dict[int, GateTree]:
    """Return the gate's tree of each layer of experts."""
    try:
        trees = parse_gate_trees(options.gate_trees, len(layers), options.num_experts)
    except AlmaError as error:
        raise UnfitCheckpoint(str(error)) from error
    return dict(zip(layers, trees, strict=True))


def _check_transformer(options: TransformerLMOptions, weights: Weights) -> None:
    """Look for the sizes of a stock model in its weights; fairseq compares the rest when it loads them."""
    _compare("decoder_layers", options.decoder_layers, _num_children(weights, "decoder.layers."))
    for name in ("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim", "decoder_ffn_embed_dim"):
        _look_for(name, getattr(options, name), weights)
    positions = options.max_target_positions or options.tokens_per_sample
    if positions is None:
        raise UnfitCheckpoint("its configuration does not say how long sequences are (tokens_per_sample)")
    if options.decoder_learned_pos and not options.no_token_positional_embeddings:
        _compare("tokens_per_sample", positions + EXTRA_POSITIONS, _find(weights, f"{_POSITIONS}weight").size(0))
    else:
        _check_table(options)


def _check_image_model(options: ImageOptions, weights: Weights, num_members: int = 1) -> None:
    """Look for the sizes of one or several image models in their weights; the rest is compared when they are built."""
    networks = _by_member(weights, "network.networks.")
    if networks:  # mixtures, side by side; others are stacked
        _compare("num_members", num_members, len(networks))
        for part in networks.values():
            _check_image_model(options, {f"network.{name}": tensor for name, tensor in part.items()})
        return
    first = next((tensor for name, tensor in weights.items() if name.startswith("network.")), None)
    if first is None:
        raise UnfitCheckpoint("its configuration is that of an image model, its weights are not")
    if num_members > 1:
        _compare("num_members", num_members, first.size(0) if first.dim() else 0)
    if options.hidden_layers is not None:
        num_layers = _num_children(weights, "network.layers.") - 1
        _compare("hidden_layers", options.hidden_layers, max(num_layers, _num_children(weights, "network.blocks.")))
    for name in ("width", "channels"):
        if getattr(options, name) is not None:
            _look_for(name, getattr(options, name), weights)
    for word in options.layer_channels.split(","):
        if word.strip().isdecimal():
            _look_for("layer_channels", int(word), weights)
    _check_experts(options, weights, ".linear.weight", ".conv.weight")


def _check_experts(options: Any, weights: Weights, *endings: str) -> None:
    """Compare the number of experts with their stacks, and the length of the trees' text with the rows of the gates."""
    rows = [tensor.size(0) for name, tensor in weights.items() if name.endswith("gate.weight") and tensor.dim()]
    for name, tensor in weights.items():
        if rows and name.endswith(endings) and options.num_experts is not None:
            _compare("num_experts", options.num_experts, tensor.size(0) if tensor.dim() else 0)
    if len(options.gate_trees or "") > 1000 + 64 * sum(rows):
        raise UnfitCheckpoint(f"gate trees of {len(options.gate_trees):,} characters for gates of {sum(rows):,} rows")


def _check_table(options: Transformer) -> None:
    positions = options.max_target_positions or options.tokens_per_sample or 0
    if (positions + EXTRA_POSITIONS) * options.decoder_embed_dim > _MAX_TABLE:
        raise UnfitCheckpoint(f"sinusoidal positions of sequences of {positions:,} tokens take too much memory")


def _num_children(weights: Weights, prefix: str) -> int:
    """Return how many different names follow a prefix."""
    return len({name.removeprefix(prefix).partition(".")[0] for name in weights if name.startswith(prefix)})


def _find(weights: Weights, name: str) -> Tensor:
    if name not in weights or weights[name].dim() != 2:
        raise UnfitCheckpoint(f"not the weights that its configuration describes: {name} is missing, or is no matrix")
    return weights[name]


def _look_for(option: str, size: int, weights: Weights) -> None:
    if not any(size in tensor.shape for tensor in weights.values()):
        raise UnfitCheckpoint(f"its configuration has {option} = {size:,}, and no weight has that size")


def _compare(option: str, announced: int, found: int) -> None:
    if announced != found:
        raise UnfitCheckpoint(
            f"its weights are misshapen: {option} is {announced:,} in its configuration, {found:,} there"
        )
