"""Where the best learning rate lies for models of several widths and depths, in one parametrization or the other.

    python recipes/benchmarks/transfer.py STREAM --mup --out sweep.jsonl
    python recipes/benchmarks/transfer.py STREAM --out sweep.jsonl       # the usual one
    python recipes/benchmarks/transfer.py --table sweep.jsonl

One pass over text that is drawn once for all models: Adam, a warm-up, then a constant rate; what is tested is the
average of the weights with a half-life of 1/16 of the updates so far, as in the recipe of alma-stream. A line for each
test: loss in nats per token on valid. A second call leaves out what the file has already. The table gives for each size
the best rate, at the lowest point of a parabola through the best loss and its neighbours over the rate's logarithm.
"""

import argparse
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F

import fairseq_alma
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.token_file import NUM_FAIRSEQ_SYMBOLS, TokenFile
from fairseq_alma.training.average import WeightAverage

PAD = 1
HEAD_WIDTH = 32
WARMUP = 50  # updates
TESTED_TOKENS = 65_536


def options_of(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the settings of each training, those of the smallest models first."""
    sizes = sorted(itertools.product(arguments.width, arguments.layers), key=lambda size: size[0] ** 2 * size[1])
    names = ("rate", "experts", "batch", "seed")
    for width, layers in sizes:
        for values in itertools.product(*(getattr(arguments, name) for name in names)):
            yield {"width": width, "layers": layers, "mup": arguments.mup, **dict(zip(names, values, strict=True))}


def train(stream: Stream, setting: Mapping[str, Any], length: int, tested: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Train one model; yield its loss on valid, nats per token, and what it took, after each of these many tokens."""
    from fairseq_alma.text.model import build_from_config

    torch.manual_seed(setting["seed"])
    width = setting["width"]
    config = {
        "decoder_embed_dim": width, "decoder_ffn_embed_dim": 4 * width, "decoder_layers": setting["layers"],
        "decoder_attention_heads": max(1, width // HEAD_WIDTH), "dropout": 0.0, "num_experts": setting["experts"],
        "gate_trees": "", "tokens_per_sample": length, "max_target_positions": None, "mup": setting["mup"],
        "finetune_from_model": None, "restore_file": "",
    }  # fmt: skip
    assert stream.tokenizer is not None
    vocab_size = stream.tokenizer.vocab_size + NUM_FAIRSEQ_SYMBOLS
    model = build_from_config(config, vocab_size, "cpu").train()
    optimizer = torch.optim.AdamW(
        model.parameters(), setting["rate"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True
    )
    average = WeightAverage(ema_half_life="1/16")
    batches = _batches(stream, length, setting)
    seconds, ends = 0.0, {each // setting["batch"]: each for each in tested}
    for update in range(max(ends)):
        started = time.perf_counter()
        tokens = next(batches)
        optimizer.param_groups[0]["lr"] = setting["rate"] * min(1.0, (update + 1) / WARMUP)
        logits, extra = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        balance = sum(each.balance_loss for each in extra["switch"])
        optimizer.zero_grad()
        (loss + 0.01 * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.after_step(model, update)
        seconds += time.perf_counter() - started
        if update + 1 in ends:
            tested_at = _averaged_loss(model, average, stream, length)
            yield {**setting, "tokens": ends[update + 1], "loss": tested_at, "seconds": round(seconds, 1)}


def _averaged_loss(model: torch.nn.Module, average: WeightAverage, stream: Stream, length: int) -> float:
    """Return the loss of the average of the weights, which stay what they are."""
    assert average.average is not None
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(average.average[name])
        loss = _valid_loss(model.eval(), stream, length)
    model.load_state_dict(kept)
    model.train()
    return loss


def _batches(stream: Stream, length: int, setting: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield (B, length + 1) of tokens; the order is the same for all models of a seed."""
    prefixes = [prefix for t in range(stream.num_megabatches) for prefix in stream.prefixes(stream.megabatch(t))]
    ids = np.concatenate([TokenFile(prefix).ids for prefix in prefixes])
    rows = ids[: (len(ids) - 1) // length * length].reshape(-1, length)
    order = np.random.default_rng(setting["seed"]).permutation(len(rows) - 1)
    size = setting["batch"] // length
    for start in range(0, len(order) - size + 1, size):
        chosen = order[start : start + size]
        batch = np.concatenate([rows[chosen], ids[(chosen + 1) * length][:, None]], axis=1)
        yield torch.from_numpy(batch.astype(np.int64))


def _valid_loss(model: torch.nn.Module, stream: Stream, length: int) -> float:
    ids = TokenFile(stream.root / "valid").ids[:TESTED_TOKENS].astype(np.int64)
    rows = torch.from_numpy(ids[: (len(ids) - 1) // length * length].reshape(-1, length))
    nexts = torch.from_numpy(ids[1 : len(rows) * length + 1].reshape(-1, length))
    total = 0.0
    with torch.no_grad():
        for row, target in zip(rows.split(16), nexts.split(16), strict=True):
            total += float(F.cross_entropy(model(row)[0].flatten(0, 1), target.flatten(), reduction="sum"))
    return total / rows.numel()


def table(found: list[dict[str, Any]]) -> str:
    """Return a row for each size: losses by rate, and the best rate."""
    names = ("mup", "width", "layers", "experts", "batch", "tokens")
    rates = sorted({each["rate"] for each in found})
    losses: dict[tuple, dict[float, list[float]]] = {}
    for each in found:
        losses.setdefault(tuple(each[name] for name in names), {}).setdefault(each["rate"], []).append(each["loss"])
    heads = ["parametrization", *names[1:], *(f"{rate:g}" for rate in rates), "best rate"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for key in sorted(losses):
        means = {rate: sum(each) / len(each) for rate, each in losses[key].items()}
        cells = ["maximal update" if key[0] else "usual", *(f"{each:,}" for each in key[1:])]
        cells += [f"{means[rate]:.4f}" if rate in means else "" for rate in rates]
        lines.append(f"| {' | '.join([*cells, best_rate(means)])} |")
    return "\n".join(lines)


def best_rate(losses: Mapping[float, float]) -> str:
    """Return the rate at the lowest point of a parabola through the lowest loss and its neighbours."""
    rates = sorted(losses)
    place = min(range(len(rates)), key=lambda i: losses[rates[i]])
    if not 0 < place < len(rates) - 1:
        return f"{rates[place]:g} (at the edge)"
    near = rates[place - 1 : place + 2]
    a, b, _ = np.polyfit(np.log(near), [losses[rate] for rate in near], 2)
    return f"{math.exp(-b / (2 * a)):.2g}"


def main() -> None:
    """Run what the file has not yet, or show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stream", nargs="?", type=Path, help="made by alma-prep-text")
    parser.add_argument("--table", type=Path, help="show the table of this file and train nothing")
    parser.add_argument("--out", type=Path, default=Path("sweep.jsonl"), help="a line for each training")
    parser.add_argument("--mup", action="store_true", help="maximal-update parametrization")
    parser.add_argument("--width", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rate", type=float, nargs="+", default=[0.00125, 0.0025, 0.005, 0.01, 0.02])
    parser.add_argument("--experts", type=int, nargs="+", default=[4], metavar="E")
    parser.add_argument("--batch", type=int, nargs="+", default=[2048], help="tokens of an update", metavar="N")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[409_600], help="after which it is tested", metavar="N"
    )
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    arguments = parser.parse_args()
    if arguments.table is not None:
        print(table([json.loads(line) for line in arguments.table.read_text().splitlines()]))
        return
    fairseq_alma.register()
    stream = Stream.open(arguments.stream)
    lines = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    done = [{k: v for k, v in json.loads(line).items() if k not in ("loss", "seconds")} for line in lines]
    for setting in options_of(arguments):
        if all({**setting, "tokens": tokens} in done for tokens in arguments.tokens):
            continue
        found = list(train(stream, setting, arguments.length, arguments.tokens))
        with arguments.out.open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in found)
        print(found[-1], flush=True)


if __name__ == "__main__":
    main()
