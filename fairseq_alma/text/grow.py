"""The job of ``alma-grow``: measure, choose, grow, write.

Measured is one pass over a stream's held-out split: the model's loss, and each expert's part in it.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Optional

import torch
from fairseq import utils
from fairseq.models import BaseFairseqModel
from omegaconf import OmegaConf

import fairseq_alma
from fairseq_alma.checkpoints.architecture import refuse_other_shapes
from fairseq_alma.checkpoints.checkpoint_file import Checkpoint, read_checkpoint, write_checkpoint
from fairseq_alma.checkpoints.checkpoint_growth import GrowthStep, enlarge_checkpoint, grow_checkpoint, growth_table
from fairseq_alma.checkpoints.ensemble_file import check_dictionary
from fairseq_alma.checkpoints.maximal_update import update_factors
from fairseq_alma.checkpoints.model_options import NO_BEGINNING, GrowOptions, from_weights, no_experts, switch_frequency
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.growth import LAYER_METHODS
from fairseq_alma.growth.gate_tree import GateTree, format_gate_trees, has_experts
from fairseq_alma.growth.sizes import POSITIONS, DepthGrowth, WidthGrowth, grow_depth, require_wider
from fairseq_alma.growth.tensors import SizeGrowth, grow_mixture, select_experts
from fairseq_alma.moe.dispatch import ExpertLosses
from fairseq_alma.options import flag
from fairseq_alma.runs.lookup import stream_of
from fairseq_alma.terminal import track
from fairseq_alma.text.linear_cross_entropy import token_losses
from fairseq_alma.text.model import AlmaSwitchLM, build_from_config, gate_trees_of, parameter_shapes, random_layers
from fairseq_alma.text.task import AlmaLMConfig, AlmaLMTask
from fairseq_alma.training.processes import hide_gpus

_UNALTERED = "nothing was written; give an unaltered checkpoint"


def grow(args: GrowOptions) -> str:
    """Grow the checkpoint ``args.path`` and write it to ``args.out``.

    Args:
        args: options of ``alma-grow``.

    Returns:
        The table of what was measured and done, and the flags that training the result takes.

    Raises:
        AlmaError: if the checkpoint cannot grow so; nothing is written then.
    """
    checkpoint = _read(args, mmap=True)
    model = _build(checkpoint, args.path)
    refuse_other_shapes(checkpoint["model"], model, args.path, _UNALTERED)
    said = []
    if args.is_wider:
        had_sinusoids = checkpoint["cfg"]["model"]["decoder_sinusoidal_pos"]
        checkpoint, model = _widen(checkpoint, model, args)
        said.append("wider: units are copied, and what reads them is split among the copies")
        if had_sinusoids and not checkpoint["cfg"]["model"]["decoder_sinusoidal_pos"]:
            said.append(
                "positions: learned ones from here on, which begin as the sinusoids; no --decoder-sinusoidal-pos"
            )
    if args.layers is not None:
        checkpoint, model, places = _deepen(checkpoint, model, args)
        said.append(f"new layers: {places} of 0 to {args.layers - 1}; their outputs are zero")
    if args.experts is None:
        write_checkpoint(checkpoint, args.out, args.force)
        return "\n".join([*said, _written(args, checkpoint)])
    trees = gate_trees_of(model)
    if not trees:
        raise no_experts(args.path)
    if args.stream is None and args.select != "random" and args.method != "scratch":
        args = replace(args, stream=str(stream_of(checkpoint, Path(args.path), None).root))
    measured = _measure(checkpoint, args) if args.stream is not None else None
    step = _plan(trees, measured, args)
    losses, counts = ({}, {}) if measured is None else _by_layer(trees, measured)
    record = _record(step, losses, counts, measured, args)
    if not said:
        # Read anew, into memory that is given back tensor by tensor as the model grows; a mapped file is all or none.
        del checkpoint
        checkpoint = _read(args, mmap=False)
    grown = grow_checkpoint(checkpoint, step, parameter_shapes(model), record)
    refuse_other_shapes(grown["model"], _build(grown, args.out), args.out, _UNALTERED)
    write_checkpoint(grown, args.out, args.force)
    return "\n".join([*said, growth_table(losses, counts, step), _written(args, grown)])


def _written(args: GrowOptions, grown: Checkpoint) -> str:
    """Say how training goes on with what was written."""
    config = grown["cfg"]["model"]
    experts = f"takes its shape from there, which is --num-experts {config['num_experts']}"
    if config["gate_trees"]:
        experts += f" --gate-trees '{config['gate_trees']}'"
    sizes = [] if args.layers is None else ["layers"]
    sizes += ["embed_dim", "ffn_embed_dim", "attention_heads"] if args.is_wider else []
    needed = "".join(f" {flag(f'decoder_{size}')} {config[f'decoder_{size}']}" for size in sizes)
    needed = f"; it needs{needed}" if needed else ""
    return f"wrote {args.out}; fairseq-train {' '.join(from_weights(args.out))} {experts}{needed}"


def _deepen(checkpoint: Checkpoint, model: AlmaSwitchLM, args: GrowOptions) -> tuple[Checkpoint, AlmaSwitchLM, str]:
    """Return the model with ``args.layers`` layers, and which of them are new."""
    assert args.layers is not None
    config = checkpoint["cfg"]["model"]
    method = args.method if args.method in LAYER_METHODS else LAYER_METHODS[0]
    old = config["decoder_layers"]
    factor = args.layers / old if config.get("mup") else 1.0  # each layer counts for a share of all
    depth = grow_depth(old, args.layers, switch_frequency(config), method, factor)
    grown_config = {**config, "decoder_layers": args.layers, "gate_trees": _deeper_trees(model, depth, config)}
    torch.manual_seed(args.seed)
    fresh = random_layers(grown_config, [layer for layer, source in enumerate(depth.sources) if source is None])
    record = {"sources": list(depth.sources), "is_new": list(depth.is_new), "method": method}
    places = ", ".join(str(layer) for layer, is_new in enumerate(depth.is_new) if is_new)
    return *_enlarge(checkpoint, model, depth, grown_config, fresh, {"depth": record}, args), f"{places} ({method})"


def _widen(checkpoint: Checkpoint, model: AlmaSwitchLM, args: GrowOptions) -> tuple[Checkpoint, AlmaSwitchLM]:
    """Return the model with ``args.embed_dim`` and ``args.ffn_dim``."""
    config = checkpoint["cfg"]["model"]
    old = config["decoder_embed_dim"], config["decoder_ffn_embed_dim"]
    embed, ffn = (old[0], args.embed_dim or old[0]), (old[1], args.ffn_dim or old[1])
    require_wider(embed, ffn)
    before, after = (update_factors(width, config["decoder_layers"], bool(config.get("mup"))) for width in embed)
    width = WidthGrowth(
        embed,
        ffn,
        args.seed,
        tokens=1.0 if config["no_scale_embedding"] else (after.embedding_width / before.embedding_width) ** 0.5,
        reads=after.features / before.features,
        writes=after.branch / before.branch,
        adds_positions=config["decoder_sinusoidal_pos"] and embed[1] > embed[0],
    )
    sizes = {"embed_dim": embed[1], "ffn_embed_dim": ffn[1]}
    sizes["attention_heads"] = config["decoder_attention_heads"] * embed[1] // embed[0]
    grown_config = {**config, **{f"decoder_{name}": size for name, size in sizes.items()}}
    fresh = {}
    if width.adds_positions:
        grown_config["decoder_sinusoidal_pos"] = False
        sinusoids = model.decoder.embed_positions
        num_rows = model.decoder.max_target_positions + sinusoids.padding_idx + 1
        table = sinusoids.get_embedding(num_rows, embed[0], sinusoids.padding_idx)
        fresh[POSITIONS] = table.repeat(1, embed[1] // embed[0])
    return _enlarge(checkpoint, model, width, grown_config, fresh, {"width": {"embed": [*embed], "ffn": [*ffn]}}, args)


def _enlarge(
    checkpoint: Checkpoint,
    model: AlmaSwitchLM,
    growth: SizeGrowth,
    config: dict[str, Any],
    fresh: Mapping[str, torch.Tensor],
    record: Mapping[str, Any],
    args: GrowOptions,
) -> tuple[Checkpoint, AlmaSwitchLM]:
    """Return a larger model's checkpoint, and that model without weights."""
    larger = _build({**checkpoint, "cfg": {"model": config}}, args.out)
    shapes = parameter_shapes(model), parameter_shapes(larger)
    record = {"options": _recorded(args), **record, "version": fairseq_alma.__version__}
    names, keep = larger.state_dict(), args.optimizer != "reset"
    grown = enlarge_checkpoint(checkpoint, growth, config, names, fresh, shapes, record, keep)
    refuse_other_shapes(grown["model"], larger, args.out, _UNALTERED)
    return grown, larger


def _deeper_trees(model: AlmaSwitchLM, depth: DepthGrowth, config: Mapping[str, Any]) -> str:
    """Return ``--gate-trees`` of the deeper model: a copy has the tree of its layer, a random one that of the last."""
    trees = gate_trees_of(model)
    if not trees:
        return ""
    last = [*trees.values()][-1]
    deeper = [
        last if source is None else trees[f"decoder.layers.{source}.switch"]
        for layer, source in enumerate(depth.sources)
        if has_experts(layer, switch_frequency(config))
    ]
    return format_gate_trees(deeper)


def _read(args: GrowOptions, mmap: bool) -> Checkpoint:
    checkpoint = read_checkpoint(args.path, mmap)
    args.refuse_for_switch(args.path)
    return checkpoint


def _build(checkpoint: Checkpoint, path: str, device: str = "meta") -> AlmaSwitchLM:
    config = checkpoint["cfg"]["model"]
    if not config.get("_name", "").startswith("alma_switch_lm"):
        raise AlmaError(
            f"{path}: architecture {config.get('_name')!r} cannot grow; give a checkpoint of alma_switch_lm…"
        )
    return build_from_config(config, checkpoint["model"]["decoder.embed_tokens.weight"].size(0), device)


def _measure(checkpoint: Checkpoint, args: GrowOptions) -> "HeldOutLosses":
    """Run the model over the held-out split."""
    if args.cpu:
        hide_gpus()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches = held_out_batches(checkpoint, args)
    model = _build(checkpoint, args.path, "cpu")
    # fairseq's own method cannot assign; assigned tensors stay in the file's memory, without a second copy
    torch.nn.Module.load_state_dict(model, checkpoint["model"], strict=True, assign=True)
    model = model.float() if device.type == "cpu" else model  # products in fp16 are slow there, or missing
    return measure_expert_losses(
        model.to(device), track(batches, len(batches), f"losses on {args.split}", "batches"), batches.pad
    )


def _by_layer(layers: Iterable[str], measured: "HeldOutLosses") -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Return losses and counts of each layer's experts as plain numbers."""
    losses, counts = measured.experts.losses, measured.experts.counts
    return (
        {layer: tensor.tolist() for layer, tensor in zip(layers, losses, strict=True)},
        {layer: tensor.tolist() for layer, tensor in zip(layers, counts, strict=True)},
    )


def _plan(trees: Mapping[str, GateTree], measured: "Optional[HeldOutLosses]", args: GrowOptions) -> GrowthStep:
    generator = torch.Generator().manual_seed(args.seed)
    plans = {}
    for index, (layer, tree) in enumerate(trees.items()):
        losses = counts = torch.zeros(tree.num_experts)
        if measured is not None:
            losses, counts = measured.experts.losses[index], measured.experts.counts[index]
        assert args.experts is not None and args.method is not None
        parents: list[Any] = [None] * args.experts
        if args.method != "scratch":
            parents = select_experts(losses, counts, args.experts, args.select, generator)
        plans[layer] = grow_mixture(tree, args.method, parents)
    keeps, shares = args.optimizer != "reset", args.optimizer == "share"
    return GrowthStep(plans, args.seed, args.noise, args.renew_share, keep_optimizer=keeps, shares_moments=shares)


def _record(
    step: GrowthStep, losses: Any, counts: Any, measured: "Optional[HeldOutLosses]", args: GrowOptions
) -> dict[str, Any]:
    """Return what the grown checkpoint remembers of this step: plain numbers, strings, lists and dictionaries."""
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
    return {"options": _recorded(args), "layers": layers, "held_out": held_out, "version": fairseq_alma.__version__}


def _recorded(args: GrowOptions) -> dict[str, Any]:
    return {name: value for name, value in asdict(args).items() if name not in ("force", "cpu")}


class HeldOutBatches:
    """Batches of a held-out split for a checkpoint's model, through the task that trained it.

    Attributes:
        pad: index of the padding symbol.
    """

    def __init__(self, task: AlmaLMTask, split: str, batch_size: int) -> None:
        self.pad = task.source_dictionary.pad()
        task.load_dataset(split)
        self.batches = task.get_batch_iterator(
            task.dataset(split), max_sentences=batch_size, ignore_invalid_inputs=True
        ).next_epoch_itr(shuffle=False)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.batches)


def held_out_batches(checkpoint: Checkpoint, args: GrowOptions) -> HeldOutBatches:
    """Open the stream ``args.stream`` and return the batches of ``args.split``.

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
        raise AlmaError(f"--tokens-per-sample {length}: the model takes {longest} tokens at most; give no more")
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
    return HeldOutBatches(AlmaLMTask.setup_task(OmegaConf.structured(config)), args.split, args.batch_size)


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

    Args:
        model: a Switch language model.
        batches: batches of fairseq's language modeling data.
        pad: index of the padding symbol, whose targets do not count.
    """
    model.eval()
    device = next(model.parameters()).device
    experts = ExpertLosses()
    total, num_tokens = 0.0, 0
    for batch in batches:
        batch = utils.move_to_cuda(batch, device=device) if device.type == "cuda" else batch
        features, extra = model(**batch["net_input"], features_only=True)
        target = batch["target"].flatten()
        is_real = target != pad
        factors, weight = model.output_factors(features, extra)
        losses = token_losses(factors.flatten(0, -2), weight, target).masked_fill(~is_real, 0.0).double()
        experts.add_routed(losses, extra["routing"], is_real)
        total += losses.sum().item()
        num_tokens += int(is_real.sum())
    return HeldOutLosses(experts, num_tokens, total / max(num_tokens, 1))
