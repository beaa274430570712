"""Implementation of ``alma-grow``: add layers or experts to a language model and write the new checkpoint."""

import shlex
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from torch import nn

import fairseq_alma
from fairseq_alma.checkpoints.checkpoint_file import (
    Checkpoint,
    check_dictionary,
    read_checkpoint,
    refuse_other_shapes,
    write_checkpoint,
)
from fairseq_alma.checkpoints.checkpoint_growth import (
    add_layers,
    grow_experts,
    growth_table,
    with_one_expert,
)
from fairseq_alma.checkpoints.model_options import SWITCH_SIZES, TRANSFORMER_SIZES, WEIGHTS_FLAG, GrowOptions
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree, format_gate_trees, has_experts
from fairseq_alma.growth.tensors import grow_mixture, select_experts
from fairseq_alma.moe.gate import ExpertLosses
from fairseq_alma.moe.switch_layer import SwitchLayer
from fairseq_alma.options import flag
from fairseq_alma.runs.lookup import stream_of
from fairseq_alma.terminal import LiveLine
from fairseq_alma.text.losses import token_losses
from fairseq_alma.text.task import AlmaLMTask
from fairseq_alma.text.transformer_lm import build_from_config
from fairseq_alma.training.stage_task import configuration_of

_UNALTERED = "no file was written; give an unaltered checkpoint"


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
        before = checkpoint["cfg"]["model"]["decoder_layers"]
        checkpoint = _add_layers(checkpoint, model, args)
        lines.append(f"added layers {before} to {args.layers - 1}; new layers output zero")
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


def _add_layers(checkpoint: Checkpoint, model: nn.Module, args: GrowOptions) -> Checkpoint:
    """Add layers to the checkpoint; new Switch layers get the gate tree of the last existing Switch layer."""
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
    record = {**_record(args), "depth": {"old": old, "new": new}}
    names = [*dict(model.named_parameters())], [*dict(larger.named_parameters())]  # in the order of the optimizer state
    outputs = larger.residual_outputs
    return add_layers(checkpoint, changed, larger.state_dict(), outputs, names, record, args.optimizer)


def _add_experts(checkpoint: Checkpoint, model: nn.Module, args: GrowOptions) -> tuple[Checkpoint, str]:
    """Return (checkpoint with ``args.experts`` more experts in each Switch layer, table of the changes)."""
    num_new, method = args.experts, args.method
    trees = {name: module.gate.tree for name, module in model.named_modules() if isinstance(module, SwitchLayer)}
    names = [*dict(model.named_parameters())]  # in the order of the optimizer state
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
    experts, held_out = (ExpertLosses(), None) if args.stream is None else _measure(checkpoint, args)
    losses, counts = (
        {layer: each.tolist() for layer, each in zip(trees, measured, strict=False)}
        for measured in (experts.losses, experts.counts)
    )
    generator = torch.Generator().manual_seed(args.seed)
    plans, layers = {}, {}
    for layer, tree in trees.items():
        parents: list[Any] = [None if method == "scratch" else 0] * num_new
        if method != "scratch" and tree.num_experts > 1:
            unknown = [0.0] * tree.num_experts
            loss, count = (torch.tensor(each.get(layer, unknown), dtype=torch.float64) for each in (losses, counts))
            parents = select_experts(loss, count, num_new, args.select, generator)
        growth = plans[layer] = grow_mixture(tree, method, parents)
        layers[layer] = {
            "old_tree": growth.old.to_nested(),
            "new_tree": growth.new.to_nested(),
            "expert_source": list(growth.expert_source),
            "losses": losses.get(layer),
            "counts": counts.get(layer),
        }
    record = {**_record(args), "layers": layers, "held_out": held_out}
    grown = grow_experts(checkpoint, plans, names, record, args.optimizer, args.seed, args.noise or 0.0)
    return grown, growth_table(losses, counts, plans)


def _with_gates(
    checkpoint: Checkpoint, names: list[str], args: GrowOptions
) -> tuple[Checkpoint, list[str], dict[str, GateTree]]:
    """Return (checkpoint with one expert in each new Switch layer, parameter names, gate tree by Switch layer)."""
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
    if args.optimizer == "reset":
        checkpoint = {name: part for name, part in checkpoint.items() if name != "last_optimizer_state"}
    mixture, new_names = with_one_expert(checkpoint, names, every)
    return mixture, new_names, {f"decoder.layers.{layer}.mlp": GateTree.flat(1) for layer in layers}


def _record(args: GrowOptions) -> dict[str, Any]:
    options = {name: value for name, value in asdict(args).items() if name not in ("force", "cpu")}
    return {"options": options, "version": fairseq_alma.__version__}


@torch.no_grad()
def _measure(checkpoint: Checkpoint, args: GrowOptions) -> tuple[ExpertLosses, dict[str, Any]]:
    """Measure the loss of each expert on ``args.split``, summed over the tokens that the expert processes.

    Returns:
        (`ExpertLosses` in fp64 on the CPU, dictionary with the number of tokens and the mean loss in nats).

    Raises:
        AlmaError: ``args.stream`` is not a text stream or lacks the split; the dictionaries of stream and model differ;
            or the sequences exceed the maximum length of the model.
    """
    assert args.stream is not None
    stream = Stream.open(args.stream, "text")
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
    given = Namespace(task="alma_lm", data=args.stream, tokens_per_sample=length, cpu=args.cpu)
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
    experts, total, num_tokens = ExpertLosses(), 0.0, 0
    with LiveLine() as line:
        for number, batch in enumerate(batches):
            line.show(f"losses on {args.split}: {number:,}/{len(batches):,} batches")
            batch = utils.apply_to_sample(lambda tensor: tensor.to(device), batch)
            features, extra = model(**batch["net_input"], features_only=True)
            target = batch["target"].flatten()
            is_real = target != pad
            losses = token_losses(features.flatten(0, 1), weight, target, bias).masked_fill(~is_real, 0.0).double()
            experts.add_routed(losses, extra["routing"], is_real)
            total += losses.sum().item()
            num_tokens += int(is_real.sum())
    return experts, {"num_tokens": num_tokens, "loss": total / max(num_tokens, 1)}
