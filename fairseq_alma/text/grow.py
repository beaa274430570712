"""The job of ``alma-grow``: measure, choose, grow, write.

Measured is one pass over a stream's held-out split: the model's loss, and each expert's part in it.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Iterable, Mapping, Optional, Sequence

import torch
from fairseq import utils
from fairseq.models import BaseFairseqModel
from omegaconf import OmegaConf
from torch import nn

import fairseq_alma
from fairseq_alma.checkpoints.architecture import refuse_other_shapes
from fairseq_alma.checkpoints.checkpoint_file import Checkpoint, read_checkpoint, write_checkpoint
from fairseq_alma.checkpoints.checkpoint_growth import (
    GrowthStep,
    add_layers,
    grow_experts,
    growth_table,
    with_one_expert,
)
from fairseq_alma.checkpoints.ensemble_file import check_dictionary
from fairseq_alma.checkpoints.model_options import (
    NO_BEGINNING,
    SWITCH_SIZES,
    TRANSFORMER_SIZES,
    USUAL_FREQUENCY,
    GrowOptions,
    from_weights,
)
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth.gate_tree import GateTree, format_gate_trees, has_experts
from fairseq_alma.growth.tensors import grow_mixture, select_experts
from fairseq_alma.moe.dispatch import ExpertLosses
from fairseq_alma.runs.lookup import stream_of
from fairseq_alma.terminal import track
from fairseq_alma.text.build_model import build_from_config, gate_trees_of, parameter_shapes
from fairseq_alma.text.linear_cross_entropy import token_losses
from fairseq_alma.text.task import AlmaLMConfig, AlmaLMTask
from fairseq_alma.training.processes import hide_gpus

_UNALTERED = "nothing was written; give an unaltered checkpoint"


def grow(args: GrowOptions) -> str:
    """Grow the checkpoint ``args.path`` and write it to ``args.out``.

    Returns:
        The table of what was measured and done, and the flags that training the result takes.

    Raises:
        AlmaError: if the checkpoint cannot grow so; nothing is written then.
    """
    checkpoint = read_checkpoint(args.path, mmap=args.layers is not None)
    model = _build(checkpoint, args.path)
    refuse_other_shapes(checkpoint["model"], model, args.path, _UNALTERED)
    lines = []
    if args.layers is not None:
        before = checkpoint["cfg"]["model"]["decoder_layers"]
        checkpoint = _add_layers(checkpoint, model, args)
        lines.append(f"new layers: {before} to {args.layers - 1}; their outputs are zero")
        model = _build(checkpoint, args.out)
    if args.experts is not None:
        checkpoint, table = _add_experts(checkpoint, model, args)
        lines.append(table)
    refuse_other_shapes(checkpoint["model"], _build(checkpoint, args.out), args.out, _UNALTERED)
    write_checkpoint(checkpoint, args.out)
    config = checkpoint["cfg"]["model"]
    shape = f"takes its shape from there, which is --num-experts {config['num_experts']}"
    if config["gate_trees"]:
        shape += f" --gate-trees '{config['gate_trees']}'"
    if args.layers is not None and config["_name"] in SWITCH_SIZES:
        shape += f"; it needs --decoder-layers {args.layers}"
    lines.append(f"wrote {args.out}; fairseq-train {' '.join(from_weights(args.out))} {shape}")
    return "\n".join(lines)


def _build(checkpoint: Checkpoint, path: str, device: str = "meta") -> Any:
    config = checkpoint["cfg"]["model"]
    if config.get("_name") not in (*SWITCH_SIZES, *TRANSFORMER_SIZES):
        raise AlmaError(
            f"{path}: architecture {config.get('_name')!r} cannot grow; give a checkpoint of alma_transformer_lm or "
            "alma_switch_lm"
        )
    return build_from_config(config, checkpoint["model"]["decoder.embed_tokens.weight"].size(0), device)


def _add_layers(checkpoint: Checkpoint, model: nn.Module, args: GrowOptions) -> Checkpoint:
    """Return the checkpoint of the model with ``args.layers`` layers; new gates have the tree of the last one."""
    config = checkpoint["cfg"]["model"]
    old, new = config["decoder_layers"], args.layers
    assert new is not None
    if new <= old:
        raise AlmaError(f"--layers {new}: the model has {old} layers already; give more")
    trees = [*gate_trees_of(model).values()]
    if trees:
        num_layers = sum(has_experts(layer, config["moe_freq"]) for layer in range(new))
        trees += [trees[-1]] * (num_layers - len(trees))
    changed = {"decoder_layers": new, "gate_trees": format_gate_trees(trees)}
    torch.manual_seed(args.seed)
    larger = _build({**checkpoint, "cfg": {"model": {**config, **changed}}}, args.out, "cpu")
    names = [*parameter_shapes(model)], [*parameter_shapes(larger)]
    record = {**_record(args), "depth": {"old": old, "new": new}}
    return add_layers(checkpoint, changed, larger.state_dict(), larger.residual_outputs, names, record, args.optimizer)


def _add_experts(checkpoint: Checkpoint, model: nn.Module, args: GrowOptions) -> tuple[Checkpoint, str]:
    """Return the checkpoint of the model with ``args.experts`` more in each layer that has any, and a table of it."""
    trees, names = gate_trees_of(model), [*parameter_shapes(model)]
    is_dense = not trees
    if is_dense:
        checkpoint, names, trees = _with_gates(checkpoint, names, args)
        if args.method == "copy" and args.noise == 0:  # equal gate rows would send all tokens to one expert
            args = replace(args, noise=0.1 * checkpoint["cfg"]["model"]["decoder_embed_dim"] ** -0.5)
    elif args.moe_freq is not None:
        raise AlmaError(f"--moe-freq {args.moe_freq}: {args.path} has its Switch layers already; omit --moe-freq")
    stream = args.stream
    if stream is None and args.select != "random" and args.method != "scratch" and not is_dense:
        stream = str(stream_of(checkpoint, Path(args.path), None).root)
    stream = None if is_dense else stream
    measured = None if stream is None else _measure(checkpoint, replace(args, stream=stream))
    step = _plan(trees, measured, args)
    losses: dict[str, list[float]] = {}
    counts: dict[str, list[int]] = {}
    if measured is not None:
        losses = {layer: each.tolist() for layer, each in zip(trees, measured.experts.losses, strict=True)}
        counts = {layer: each.tolist() for layer, each in zip(trees, measured.experts.counts, strict=True)}
    layers = {
        name: {
            "old_tree": growth.old.to_nested(),
            "new_tree": growth.new.to_nested(),
            "expert_source": list(growth.expert_source),
            "losses": losses.get(name),
            "counts": counts.get(name),
        }
        for name, growth in step.layers.items()
    }
    held_out = None if measured is None else {"num_tokens": measured.num_tokens, "loss": measured.loss}
    record = {**_record(replace(args, stream=stream)), "layers": layers, "held_out": held_out}
    return grow_experts(checkpoint, step, names, record), growth_table(losses, counts, step)


def _with_gates(
    checkpoint: Checkpoint, names: Sequence[str], args: GrowOptions
) -> tuple[Checkpoint, list[str], dict[str, GateTree]]:
    """Return a dense model's checkpoint with one expert in every n-th layer, its parameters, and the layers' trees."""
    config, every = checkpoint["cfg"]["model"], USUAL_FREQUENCY if args.moe_freq is None else args.moe_freq
    layers = [layer for layer in range(config["decoder_layers"]) if has_experts(layer, every)]
    if config["_name"] not in TRANSFORMER_SIZES:
        raise AlmaError(f"{args.path}: its model has no Switch layer (--moe-freq 0), so there is nothing to grow")
    if not layers:
        raise AlmaError(f"--moe-freq {every}: {args.path} has {config['decoder_layers']} layers; give one of them")
    if args.optimizer == "reset":
        checkpoint = {name: part for name, part in checkpoint.items() if name != "last_optimizer_state"}
    assert args.experts is not None
    # The copies share the gate's mass evenly at first, so each has to count as much as all of them.
    factor = args.experts + 1 if args.method == "copy" else 1
    mixture, new_names = with_one_expert(checkpoint, names, every, factor)
    return mixture, new_names, {f"decoder.layers.{layer}.mlp": GateTree.flat(1) for layer in layers}


def _plan(trees: Mapping[str, GateTree], measured: "Optional[HeldOutLosses]", args: GrowOptions) -> GrowthStep:
    assert args.experts is not None and args.method is not None
    generator = torch.Generator().manual_seed(args.seed)
    plans = {}
    for index, (layer, tree) in enumerate(trees.items()):
        losses = counts = torch.zeros(tree.num_experts)
        if measured is not None:
            losses, counts = measured.experts.losses[index], measured.experts.counts[index]
        parents: list[Any] = [None] * args.experts
        if args.method != "scratch" and tree.num_experts == 1:
            parents = [0] * args.experts
        elif args.method != "scratch":
            parents = select_experts(losses, counts, args.experts, args.select, generator)
        plans[layer] = grow_mixture(tree, args.method, parents)
    return GrowthStep(plans, args.seed, args.noise, args.optimizer)


def _record(args: GrowOptions) -> dict[str, Any]:
    """Return what the grown checkpoint remembers of a step: plain numbers, strings, lists and dictionaries."""
    options = {name: value for name, value in asdict(args).items() if name not in ("force", "cpu")}
    return {"options": options, "version": fairseq_alma.__version__}


def _measure(checkpoint: Checkpoint, args: GrowOptions) -> "HeldOutLosses":
    """Run the model over the held-out split."""
    if args.cpu:
        hide_gpus()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches, pad = held_out_batches(checkpoint, args)
    model = _build(checkpoint, args.path, "cpu")
    # fairseq's own method cannot assign; assigned tensors stay in the file's memory, without a second copy
    torch.nn.Module.load_state_dict(model, checkpoint["model"], strict=True, assign=True)
    shown = track(batches, len(batches), f"losses on {args.split}", "batches")
    return measure_expert_losses(model.float().to(device), shown, pad)


def held_out_batches(checkpoint: Checkpoint, args: GrowOptions) -> tuple[Any, int]:
    """Open the stream ``args.stream`` and return the batches of ``args.split``, and the index of the padding symbol.

    Raises:
        AlmaError: if it is no stream of text, has another dictionary than the checkpoint, or lacks the split, or if the
            sequences are longer than the model takes.
    """
    assert args.stream is not None
    check_dictionary(checkpoint, args.path, Stream.open(args.stream))
    model = checkpoint["cfg"]["model"]
    length = args.tokens_per_sample or model["tokens_per_sample"]
    longest = model.get("max_target_positions") or model["tokens_per_sample"]
    if length > longest:
        raise AlmaError(f"--tokens-per-sample {length}: the model takes {longest} tokens at most; give fewer")
    config = AlmaLMConfig(data=args.stream, tokens_per_sample=length)
    elsewhere = {
        "path": None,
        **NO_BEGINNING,
        "save_dir": "",
        "continue_once": None,
        "reset_dataloader": False,
        "cpu": True,
    }
    for name, value in elsewhere.items():
        setattr(config, name, value)
    config.seed, config.dataset_impl, config.use_plasma_view = 1, None, False
    config.plasma_path, config.max_target_positions = "", None
    task = AlmaLMTask.setup_task(OmegaConf.structured(config))
    task.load_dataset(args.split)
    batches = task.get_batch_iterator(
        task.dataset(args.split), max_sentences=args.batch_size, ignore_invalid_inputs=True
    )
    return batches.next_epoch_itr(shuffle=False), task.source_dictionary.pad()


@dataclass(frozen=True)
class HeldOutLosses:
    """What one pass has measured.

    Attributes:
        experts: sums in fp64 and int64, on the CPU.
        num_tokens: tokens in all.
        loss: mean loss per token, in nats.
    """

    experts: ExpertLosses
    num_tokens: int
    loss: float


@torch.no_grad()
def measure_expert_losses(model: BaseFairseqModel, batches: Iterable[dict[str, Any]], pad: int) -> HeldOutLosses:
    """Sum up, for every expert of every Switch layer, the losses of the tokens that are routed to it.

    Targets with the index ``pad`` do not count.
    """
    model.eval()
    device = next(model.parameters()).device
    experts = ExpertLosses()
    total, num_tokens = 0.0, 0
    for batch in batches:
        batch = utils.apply_to_sample(lambda tensor: tensor.to(device), batch)
        features, extra = model(**batch["net_input"], features_only=True)
        target = batch["target"].flatten()
        is_real = target != pad
        weight, bias = model.decoder.output_projection.weight, model.decoder.logit_bias
        losses = token_losses(features.flatten(0, 1), weight, target, bias).masked_fill(~is_real, 0.0).double()
        experts.add_routed(losses, extra["routing"], is_real)
        total += losses.sum().item()
        num_tokens += int(is_real.sum())
    return HeldOutLosses(experts, num_tokens, total / max(num_tokens, 1))
