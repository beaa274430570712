"""Implementation of ``alma-grow``: add layers or experts to a language model and write the new checkpoint.

A growth step changes weights, averaged weights, configuration and optimizer state, and adds a record of the step.
"""

import re
import shlex
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence

import torch
from fairseq import utils
from torch import Tensor

import fairseq_alma
from fairseq_alma.checkpoints import AVERAGE
from fairseq_alma.checkpoints.checkpoint_file import (
    Checkpoint,
    check_dictionary,
    find_average,
    read_checkpoint,
    refuse_other_shapes,
    write_checkpoint,
)
from fairseq_alma.checkpoints.model_options import SWITCH_SIZES, TRANSFORMER_SIZES, WEIGHTS_FLAG, GrowOptions
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree, format_gate_trees, has_experts
from fairseq_alma.growth.tensors import (
    EXPERTS,
    GATE_TENSOR,
    MixtureGrowth,
    grow_mixture,
    grow_moments,
    grow_optimizer_state,
    grow_tensor,
    select_experts,
)
from fairseq_alma.moe import SwitchLayer, sum_by_expert
from fairseq_alma.options import flag
from fairseq_alma.runs.lookup import stream_of
from fairseq_alma.terminal import LiveLine
from fairseq_alma.text.losses import token_losses
from fairseq_alma.text.task import AlmaLMTask
from fairseq_alma.text.transformer_lm import build_from_config
from fairseq_alma.training.stage_task import configuration_of

# Key in a grown checkpoint. The value is a list of records (dictionaries), one for each growth step.
RECORD_KEY = "alma_growth"
_UNALTERED = "no file was written; give an unaltered checkpoint"
_DENSE_WEIGHT = re.compile(r"(?P<mlp>decoder\.layers\.(?P<layer>\d+)\.mlp\.)(?P<kind>gate|up|down)_proj\.weight")


def grow(args: GrowOptions) -> str:
    """Grow the checkpoint ``args.path``, and write the new checkpoint to ``args.out``.

    Returns:
        Text to print: a table of expert losses and new experts, and the command that trains the new checkpoint.

    Raises:
        AlmaError: the checkpoint cannot grow as requested; no file is written.
    """
    checkpoint = read_checkpoint(args.path, mmap=args.layers is not None)
    model = _build(checkpoint, args.path)
    refuse_other_shapes(checkpoint["model"], model, args.path, _UNALTERED)
    lines = []
    if args.layers is not None:
        lines.append(f"{args.layers} layers instead of {len(model.decoder.layers)}; new layers output zero")
        checkpoint = _add_layers(checkpoint, model, args)
        model = _build(checkpoint, args.out)
    if args.experts is not None:
        checkpoint, table = _add_experts(checkpoint, model, args)
        lines.append(table)
    refuse_other_shapes(checkpoint["model"], _build(checkpoint, args.out), args.out, _UNALTERED)
    write_checkpoint(checkpoint, args.out)
    config = checkpoint["cfg"]["model"]
    layers = f" --decoder-layers {config['decoder_layers']}"
    given, read = (layers, "") if config["_name"] in SWITCH_SIZES else ("", layers)
    read += f" --num-experts {config['num_experts']}"
    if config["gate_trees"]:
        read += f" --gate-trees '{config['gate_trees']}'"
    lines += [f"wrote {args.out}", f"train with: fairseq-train {WEIGHTS_FLAG} {shlex.quote(args.out)}{given}"]
    return "\n".join([*lines, f"fairseq-train reads these options from the checkpoint:{read}"])


def _build(checkpoint: Checkpoint, path: str, device: str = "meta") -> Any:
    config = checkpoint["cfg"]["model"]
    if config.get("_name") not in (*SWITCH_SIZES, *TRANSFORMER_SIZES):
        raise AlmaError(
            f"{path}: architecture {config.get('_name')!r} cannot grow; give a checkpoint of alma_transformer_lm or "
            "alma_switch_lm"
        )
    table = checkpoint["model"].get("decoder.embed_tokens.weight", torch.empty(0))  # refuse_other_shapes reports it
    return build_from_config(config, table.size(0), device)


def _add_layers(checkpoint: Checkpoint, model: Any, args: GrowOptions) -> Checkpoint:
    """Add layers that output zero; new Switch layers get the gate tree of the last existing Switch layer."""
    config, new = checkpoint["cfg"]["model"], args.layers
    old, trees = config["decoder_layers"], [each.gate.tree for each in model.modules() if isinstance(each, SwitchLayer)]
    assert new is not None
    if new <= old:
        raise AlmaError(f"--layers {new}: the model already has {old} layers; give --layers {old + 1} or more")
    if trees:
        trees += trees[-1:] * (sum(has_experts(layer, config["moe_freq"]) for layer in range(new)) - len(trees))
    changed = {"decoder_layers": new, "gate_trees": format_gate_trees(trees)}
    torch.manual_seed(args.seed)
    larger = _build({**checkpoint, "cfg": {"model": {**config, **changed}}}, args.out, "cpu")
    fresh, outputs = larger.state_dict(), larger.residual_outputs
    fresh = {name: torch.zeros_like(each) if name.endswith(outputs) else each for name, each in fresh.items()}
    names = [*dict(model.named_parameters())], [*dict(larger.named_parameters())]

    def deepen(weights: Mapping[str, Tensor], wanted: Iterable[str]) -> dict[str, Tensor]:
        dtype = next(iter(weights.values())).dtype
        return {name: weights[name] if name in weights else fresh[name].to(dtype) for name in wanted}

    if (entry := find_average(checkpoint)) is not None:
        entry[AVERAGE] = deepen(entry[AVERAGE], names[1])
    grown = {**checkpoint, "model": deepen(checkpoint["model"], fresh)}
    return _complete(grown, changed, names, lambda _, entry: dict(entry), args, {"depth": {"old": old, "new": new}})


def _add_experts(checkpoint: Checkpoint, model: Any, args: GrowOptions) -> tuple[Checkpoint, str]:
    """Return (checkpoint with ``args.experts`` more experts in each Switch layer, table of the changes)."""
    num_new, method = args.experts, args.method
    trees = {name: module.gate.tree for name, module in model.named_modules() if isinstance(module, SwitchLayer)}
    names = [*dict(model.named_parameters())]
    assert num_new is not None and method is not None
    if trees and args.moe_freq not in (None, checkpoint["cfg"]["model"]["moe_freq"]):
        raise AlmaError(f"--moe-freq {args.moe_freq}: {args.path} already has Switch layers; omit --moe-freq")
    is_dense = all(tree.num_experts == 1 for tree in trees.values())
    for name in ("stream", "split", "select", "batch_size", "tokens_per_sample") if is_dense else ():
        if getattr(args, name) != getattr(GrowOptions, name):
            raise AlmaError(f"{flag(name)}: {args.path} has no experts to measure or select; omit {flag(name)}")
    if not trees:
        checkpoint, names, trees = _with_gates(checkpoint, names, args)
    elif not is_dense and args.stream is None and args.select != "random" and method != "scratch":
        args = replace(args, stream=str(stream_of(checkpoint, Path(args.path), None).root))
    if is_dense:
        if args.optimizer == "share" and num_new > 1:  # the copies are no halves
            raise AlmaError(
                f"--optimizer share: a dense layer is split into {num_new + 1} experts, not in halves; give --experts "
                "1, or --optimizer copy"
            )
        if args.noise == 0:
            raise AlmaError(
                f"--noise 0: {args.path} has one expert in each layer, so all gate rows would be equal and all tokens "
                "would go to one expert; omit --noise"
            )
        if method == "copy" and args.noise is None:
            args = replace(args, noise=0.1 * checkpoint["cfg"]["model"]["decoder_embed_dim"] ** -0.5)
    measured, held_out = ({}, None) if args.stream is None else _measure(checkpoint, trees, args, args.stream)
    generator = torch.Generator().manual_seed(args.seed)
    plans, layers = {}, {}
    for layer, tree in trees.items():
        losses, counts = measured.get(layer, ([0.0] * tree.num_experts, [0] * tree.num_experts))
        parents: list[Any] = [None if method == "scratch" else 0] * num_new
        if method != "scratch" and tree.num_experts > 1:
            parents = select_experts(losses, counts, num_new, args.select, generator)
        growth = plans[layer] = grow_mixture(tree, method, parents)
        layers[layer] = {
            "old_tree": growth.old.to_nested(),
            "new_tree": growth.new.to_nested(),
            "expert_source": list(growth.expert_source),
            "losses": losses if measured else None,
            "counts": counts if measured else None,
        }
    grown = grow_experts(checkpoint, plans, names, args, {"layers": layers, "held_out": held_out})
    return grown, _growth_table(plans, measured)


def _with_gates(
    checkpoint: Checkpoint, names: Sequence[str], args: GrowOptions
) -> tuple[Checkpoint, list[str], dict[str, GateTree]]:
    """Replace every n-th MLP of a dense ``alma_transformer_lm`` with a Switch layer: one expert, zero gate weights.

    Return (checkpoint, parameter names, gate tree by Switch layer). Experts have the optimizer state of the replaced
    MLPs. The result is an intermediate format for `grow_experts`; trained models have no such layers.
    """
    config = checkpoint["cfg"]["model"]
    every = config["moe_freq"] if args.moe_freq is None else args.moe_freq
    layers = [layer for layer in range(config["decoder_layers"]) if has_experts(layer, every)]
    if config["_name"] not in TRANSFORMER_SIZES:
        raise AlmaError(
            f"{args.path}: expected Switch layers, found none (trained with --moe-freq 0); give a model with Switch "
            "layers, or an alma_transformer_lm"
        )
    if not layers:
        depth = config["decoder_layers"]
        raise AlmaError(f"--moe-freq {every}: gives no Switch layer in {args.path} ({depth} layers); give 1 to {depth}")

    def rename(name: str) -> list[str]:
        # In the order of the model, the new gate precedes the gate projection of the expert.
        match = _DENSE_WEIGHT.fullmatch(name)
        if match is None or int(match["layer"]) not in layers:
            return [name]
        expert = f"{match['mlp']}{EXPERTS}{match['kind']}_proj"
        return [f"{match['mlp']}{GATE_TENSOR}", expert] if match["kind"] == "gate" else [expert]

    def convert(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        converted: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            *gate, new = rename(name)
            converted |= {each: torch.zeros(1, tensor.size(1), dtype=tensor.dtype) for each in gate}
            converted[new] = tensor if new == name else tensor.unsqueeze(0)
        return converted

    def convert_entry(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        if f".{EXPERTS}" not in name:
            return dict(entry)
        return {key: each[None] if torch.is_tensor(each) and each.dim() > 0 else each for key, each in entry.items()}

    new_names = [new for name in names for new in rename(name)]
    cfg = {**checkpoint["cfg"], "model": {**config, "moe_freq": every}}
    mixture = {**checkpoint, "model": convert(checkpoint["model"]), "cfg": cfg}
    if (entry := find_average(checkpoint)) is not None:
        entry[AVERAGE] = convert(entry[AVERAGE])
    state = mixture.pop("last_optimizer_state", None)
    if state is not None and args.optimizer != "reset":
        old_names = [rename(name)[-1] for name in names]
        mixture["last_optimizer_state"] = grow_optimizer_state(state, old_names, new_names, convert_entry)
    return mixture, new_names, {f"decoder.layers.{layer}.mlp": GateTree.flat(1) for layer in layers}


def grow_experts(
    checkpoint: Checkpoint,
    plans: Mapping[str, MixtureGrowth],
    names: Sequence[str],
    args: GrowOptions,
    facts: Mapping[str, Any],
) -> Checkpoint:
    """Return a checkpoint of the model with additional experts in each Switch layer.

    Args:
        checkpoint: checkpoint to grow, modified in place; ``checkpoint["model"]`` is empty afterwards, to save memory.
        plans: growth plan of each Switch layer, by layer name.
        names: parameter names, in the order of the model.
        args: options of ``alma-grow``, of which ``optimizer``, ``seed`` and ``noise`` are used.
        facts: further entries of the record of the growth step.

    Raises:
        AlmaError: ``args.optimizer`` is not ``reset``, and the optimizer state is missing or does not fit the model.
    """

    def part_of(name: str) -> tuple[str, Optional[MixtureGrowth]]:
        # (name within the Switch layer, growth plan of the layer), or (name, None) outside of Switch layers
        for layer, growth in plans.items():
            part = name.removeprefix(f"{layer}.")
            if part != name and part.startswith((EXPERTS, GATE_TENSOR)):
                return part, growth
        return name, None

    def grow_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(args.seed)  # same new weights in the model and the averaged weights
        grown = {}
        for name in list(weights):
            (part, growth), tensor = part_of(name), weights.pop(name)
            grown[name] = tensor if growth is None else grow_tensor(part, tensor, growth, generator, args.noise or 0.0)
        return grown

    def grow_entry(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        part, growth = part_of(name)
        return dict(entry) if growth is None else grow_moments(part, entry, growth, args.optimizer == "share")

    trees = [growth.new for growth in plans.values()]
    config = {"num_experts": trees[0].num_experts, "gate_trees": format_gate_trees(trees)}
    # New weights depend on the order of parameters, so the average needs the order of the model.
    if (entry := find_average(checkpoint)) is not None:
        average = {name: entry[AVERAGE][name] for name in checkpoint["model"] if name in entry[AVERAGE]}
        entry[AVERAGE] = grow_weights(average)
    grown = {**checkpoint, "model": grow_weights(checkpoint["model"])}
    return _complete(grown, config, (names, names), grow_entry, args, facts)


def _complete(
    grown: Checkpoint,
    config: Mapping[str, Any],
    names: tuple[Sequence[str], Sequence[str]],
    grow: Callable[[str, Mapping[str, Any]], dict[str, Any]],
    args: GrowOptions,
    facts: Mapping[str, Any],
) -> Checkpoint:
    """Return ``grown`` with changed model options, the growth record and, unless it is reset, the optimizer state.

    ``names`` are the parameter names of the (old, new) model, in the order of each model. `grow_optimizer_state` calls
    ``grow`` for each parameter. The record contains ``facts``.
    """
    state = grown.pop("last_optimizer_state", None)
    if args.optimizer != "reset":
        if state is None:
            raise AlmaError(
                f"--optimizer {args.optimizer}: the checkpoint has no optimizer state; use --optimizer reset"
            )
        grown["last_optimizer_state"] = grow_optimizer_state(state, *names, grow)
    options = {name: value for name, value in asdict(args).items() if name not in ("force", "cpu")}
    record = {"options": options, "version": fairseq_alma.__version__, **facts}
    cfg = {**grown["cfg"], "model": {**grown["cfg"]["model"], **config}}
    return {**grown, "cfg": cfg, RECORD_KEY: [*grown.get(RECORD_KEY, []), record]}


def _growth_table(
    plans: Mapping[str, MixtureGrowth], measured: Mapping[str, tuple[Sequence[float], Sequence[int]]]
) -> str:
    """Return a table of growth plans: a line per old expert, and one per layer for random experts.

    For each layer, ``measured`` has the summed loss of each expert in nats, and the tokens of each expert; it is empty
    if the losses were not measured.
    """
    lines = ["layer | expert | tokens | loss, nats | loss per token | becomes"]
    for layer, growth in plans.items():
        for expert in range(growth.old.num_experts):
            children = [str(new) for new, source in enumerate(growth.expert_source) if source == expert]
            figures = "– | – | –"
            if layer in measured:
                loss, tokens = (each[expert] for each in measured[layer])
                figures = f"{tokens:,} | {loss:,.1f} | {loss / tokens:.3f}" if tokens else "0 | 0.0 | –"
            lines.append(f"{layer} | {expert} | {figures} | {' and '.join(children) if len(children) > 1 else ''}")
        if fresh := [str(new) for new, source in enumerate(growth.expert_source) if source is None]:
            lines.append(f"{layer} | new | – | – | – | {', '.join(fresh)} (random weights)")
    return "\n".join(lines)


@torch.no_grad()
def _measure(
    checkpoint: Checkpoint, trees: Mapping[str, GateTree], args: GrowOptions, stream_path: str
) -> tuple[dict[str, tuple[list[float], list[int]]], Optional[dict[str, Any]]]:
    """Measure the loss of each expert on ``args.split``, summed over the tokens that the expert processes.

    Returns:
        (Switch layer -> (loss in nats, number of tokens) of each expert, number of all tokens and their mean loss).

    Raises:
        AlmaError: ``stream_path`` is not a text stream or lacks the split; the dictionaries of stream and model differ;
            or the sequences exceed the maximum length of the model.
    """
    stream = Stream.open(stream_path, "text")
    check_dictionary(checkpoint, args.path, stream)
    stream.split(args.split)  # raises an error if the split does not exist
    config = checkpoint["cfg"]["model"]
    length = args.tokens_per_sample or config["tokens_per_sample"]
    longest = config.get("max_target_positions") or config["tokens_per_sample"]
    if length > longest:
        raise AlmaError(
            f"--tokens-per-sample {length}: must be at most {longest}, the maximum length of the model; give {longest} "
            "or less"
        )
    given = Namespace(task="alma_lm", data=stream_path, tokens_per_sample=length, cpu=args.cpu)
    task = AlmaLMTask.setup_task(configuration_of(given).task)
    task.load_dataset(args.split)
    sizes: dict[str, Any] = {"max_sentences": args.batch_size, "ignore_invalid_inputs": True}
    batches = task.get_batch_iterator(task.dataset(args.split), **sizes).next_epoch_itr(shuffle=False)
    pad, device = task.source_dictionary.pad(), torch.device(task.features.setting.device)
    model = _build(checkpoint, args.path, "cpu")
    # Use torch's method: fairseq's method cannot assign tensors, and assigning avoids a second copy in memory.
    torch.nn.Module.load_state_dict(model, checkpoint["model"], strict=True, assign=True)
    model.float().to(device).eval()
    weight, bias = model.decoder.output_projection.weight, model.decoder.logit_bias
    sums = {layer: torch.zeros(2, tree.num_experts, dtype=torch.float64) for layer, tree in trees.items()}
    total, num_tokens = 0.0, 0
    with LiveLine() as line:
        for number, batch in enumerate(batches):
            line.show(f"losses on {args.split}: {number:,}/{len(batches):,} batches")
            batch = utils.apply_to_sample(lambda tensor: tensor.to(device), batch)
            features, extra = model(**batch["net_input"], features_only=True)
            target = batch["target"].flatten()
            is_real = target != pad
            losses = token_losses(features.flatten(0, 1), weight, target, bias).masked_fill(~is_real, 0.0).double()
            for each, routing in zip(sums.values(), extra["routing"], strict=True):
                each += sum_by_expert(losses, routing, is_real)
            total += losses.sum().item()
            num_tokens += int(is_real.sum())
    measured = {layer: (each[0].tolist(), each[1].long().tolist()) for layer, each in sums.items()}
    return measured, {"num_tokens": num_tokens, "loss": total / max(num_tokens, 1)}
