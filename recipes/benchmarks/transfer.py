"""Where the best learning rate lies for models of several sizes, and the best batch and average after so many tokens.

    python recipes/benchmarks/transfer.py STREAM --mup --out sweep.jsonl
    python recipes/benchmarks/transfer.py STREAM --out sweep.jsonl       # the usual parametrization
    python recipes/benchmarks/transfer.py --table sweep.jsonl
    python recipes/benchmarks/transfer.py STREAM --mup --width 64 --layers 2 --batch 512 1024 2048 4096 \\
        --tokens 250000 500000 1000000 2000000 4000000 --half-life 1/4 1/8 1/16 1/32 1/64 --out fit.jsonl
    python recipes/benchmarks/transfer.py --fit fit.jsonl --figure fit.svg

One pass over text that is drawn once for all models: Adam, a warm-up, then a constant rate; what is tested is the
average of the weights with a half-life of 1/16 of the updates so far, as in the recipe of alma-stream, or with several.
A line for each test: loss in nats per token on valid. A second call leaves out what the file has already. The table
gives for each size the best rate, at the lowest point of a parabola through the best loss and its neighbours over the
rate's logarithm; the fit the best rate, batch and half-life over the tokens read, each a power of them.
"""

import argparse
import itertools
import json
import math
import time
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Any, Iterator, Mapping, NamedTuple, Optional, Sequence

import numpy as np
import torch
import torch.nn.functional as F

import fairseq_alma
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import NUM_FAIRSEQ_SYMBOLS, TokenFile
from fairseq_alma.training.average import WeightAverage

PAD = 1
HEAD_WIDTH = 32
WARMUP = 50  # updates
TESTED_TOKENS = 65_536


def options_of(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the settings of each training, those of the smallest models first."""
    sizes = sorted(itertools.product(arguments.width, arguments.layers), key=lambda size: size[0] ** 2 * size[1])
    names = ("rate", "experts", "batch", "beta2", "seed")
    for width, layers in sizes:
        for values in itertools.product(*(getattr(arguments, name) for name in names)):
            yield {"width": width, "layers": layers, "mup": arguments.mup, **dict(zip(names, values, strict=True))}


def train(
    stream: Stream, setting: Mapping[str, Any], length: int, tested: Sequence[int], half_lives: Sequence[str]
) -> Iterator[dict[str, Any]]:
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
        model.parameters(), setting["rate"], betas=(0.9, setting["beta2"]), eps=1e-8, weight_decay=0.0, fused=True
    )
    averages = {share: WeightAverage(ema_half_life=share) for share in half_lives}
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
        for average in averages.values():
            average.after_step(model, update)
        seconds += time.perf_counter() - started
        if update + 1 in ends:
            for share, average in averages.items():
                loss_then = _averaged_loss(model, average, stream, length)
                read = {"tokens": ends[update + 1], "half_life": share}
                yield {**setting, **read, "loss": loss_then, "seconds": round(seconds, 1)}


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


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the lines of some files."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def table(found: list[dict[str, Any]]) -> str:
    """Return a row for each size, batch and second beta: losses by rate, of the best average, and the best rate."""
    names = ("mup", "width", "layers", "experts", "batch", "beta2", "tokens")
    rates = sorted({each["rate"] for each in found})
    losses: dict[tuple, dict[float, dict[int, float]]] = {}
    for each in found:
        of_seeds = losses.setdefault(tuple(each[name] for name in names), {}).setdefault(each["rate"], {})
        of_seeds[each["seed"]] = min(of_seeds.get(each["seed"], math.inf), each["loss"])
    heads = ["parametrization", *names[1:], *(f"{rate:g}" for rate in rates), "best rate"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for key in sorted(losses):
        means = {rate: fmean(of_seeds.values()) for rate, of_seeds in losses[key].items()}
        cells = ["maximal update" if key[0] else "usual", *(f"{each:,}" for each in key[1:])]
        cells += [f"{means[rate]:.4f}" if rate in means else "" for rate in rates]
        lines.append(f"| {' | '.join([*cells, best_rate(means)])} |")
    return "\n".join(lines)


def best_rate(losses: Mapping[float, float]) -> str:
    """Return the rate at the lowest point of a parabola through the lowest loss and its neighbours."""
    rate, _, is_inside = lowest(losses)
    return f"{rate:.2g}" if is_inside else f"{rate:g} (at the edge)"


def lowest(losses: Mapping[float, float]) -> tuple[float, float, bool]:
    """Return where a loss is lowest, how low, and whether there are higher ones on both sides.

    Args:
        losses: at some values, over whose logarithm a parabola goes through the lowest and its two neighbours.
    """
    values = sorted(losses)
    place = min(range(len(values)), key=lambda i: losses[values[i]])
    if not 0 < place < len(values) - 1:
        return values[place], losses[values[place]], False
    near = values[place - 1 : place + 2]
    a, b, c = np.polyfit(np.log(near), [losses[value] for value in near], 2)
    return math.exp(-b / (2 * a)), c - b * b / (4 * a), True


class Best(NamedTuple):
    """What is best after so many tokens, each value with whether others were tried on both sides of it."""

    tokens: int
    loss: float
    rate: tuple[float, bool]
    batch: tuple[float, bool]
    half_life: tuple[float, bool]


def fit(found: list[dict[str, Any]]) -> list[Best]:
    """Return what is best after each number of tokens: each value with the best of the others."""
    best = []
    for tokens in sorted({each["tokens"] for each in found}):
        then = [each for each in found if each["tokens"] == tokens]

        def over(name: str, then: list[dict[str, Any]] = then) -> tuple[float, float, bool]:
            by_value: dict[float, float] = {}
            for each in then:
                value = float(Fraction(str(each[name])))
                by_value[value] = min(by_value.get(value, math.inf), each["loss"])
            return lowest(by_value)

        values = {name: over(name) for name in ("rate", "batch", "half_life")}
        ends = {name: (value, is_inside) for name, (value, _, is_inside) in values.items()}
        best.append(Best(tokens, min(each["loss"] for each in then), **ends))
    return best


def power(best: Sequence[Best], name: str) -> Optional[tuple[float, float]]:
    """Return the value at a million tokens and the power of the tokens; None: fewer than three are inside the grid."""
    points = [(each.tokens / 1e6, getattr(each, name)[0]) for each in best if getattr(each, name)[1]]
    if len(points) < 3:
        return None
    tokens, values = np.log(np.array(points).T)
    slope, start = np.polyfit(tokens, values, 1)
    return math.exp(start), float(slope)


def fit_table(best: Sequence[Best]) -> str:
    """Return a row for each number of tokens, and the powers below."""
    lines = ["| tokens | loss | best rate | best batch | best half-life |", "|---:|---:|---:|---:|---:|"]
    for each in best:
        cells = [f"{each.tokens:,}", f"{each.loss:.4f}"]
        for value, is_inside in each[2:]:
            cells.append(f"{value:,.0f}" if value > 1 else f"{value:.3g}")
            cells[-1] += "" if is_inside else " (at the edge)"
        lines.append(f"| {' | '.join(cells)} |")
    for name in Best._fields[2:]:
        found = power(best, name)
        law = "too few points" if found is None else f"{found[0]:.3g} x (tokens / 1,000,000)^{found[1]:.2f}"
        lines.append(f"\n{name.replace('_', '-')}: {law}")
    return "\n".join(lines)


def draw(best: Sequence[Best], path: Path) -> None:
    """Draw what is best over the tokens read."""
    from fairseq_alma.report.figures import style

    with style.drawn(path, 9, 3) as figure:
        for axes, name in zip(figure.subplots(1, 3), Best._fields[2:], strict=True):
            tokens = [each.tokens for each in best]
            for inside, marker, said in ((True, "o", "lowest of a parabola"), (False, "x", "at the edge of the grid")):
                points = [(each.tokens, getattr(each, name)[0]) for each in best if getattr(each, name)[1] is inside]
                axes.plot(*zip(*points, strict=True) if points else ([], []), marker, color="C0", label=said)
            if (law := power(best, name)) is not None:
                line = [law[0] * (each / 1e6) ** law[1] for each in tokens]
                axes.plot(tokens, line, "C1", label=f"power {law[1]:.2f}")
            style.logarithmic(axes.xaxis, tokens)
            style.logarithmic(axes.yaxis, [getattr(each, name)[0] for each in best])
            axes.set(xlabel="tokens read", title=f"best {name.replace('_', '-')}")
            axes.legend()


def main() -> None:
    """Run what the file has not yet, or show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stream", nargs="?", type=Path, help="made by alma-prep-text")
    parser.add_argument("--table", type=Path, nargs="+", help="show the table of these files and train nothing")
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
    parser.add_argument("--half-life", nargs="+", default=["1/16"], help="of the average, in updates so far")
    parser.add_argument("--beta2", type=float, nargs="+", default=[0.95], help="of Adam, for the squares of gradients")
    parser.add_argument("--fit", type=Path, nargs="+", help="show what is best in these files and train nothing")
    parser.add_argument("--figure", type=Path, help="draw that, with --fit (.svg)")
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    arguments = parser.parse_args()
    if arguments.table is not None:
        print(table(read(arguments.table)))
        return
    if arguments.fit is not None:
        best = fit(read(arguments.fit))
        print(fit_table(best))
        if arguments.figure is not None:
            draw(best, arguments.figure)
        return
    fairseq_alma.register()
    stream = Stream.open(arguments.stream)
    lines = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    done = [{k: v for k, v in json.loads(line).items() if k not in ("loss", "seconds")} for line in lines]
    for setting in options_of(arguments):
        tests = itertools.product(arguments.tokens, arguments.half_life)
        if all({**setting, "tokens": tokens, "half_life": share} in done for tokens, share in tests):
            continue
        found = list(train(stream, setting, arguments.length, arguments.tokens, arguments.half_life))
        with arguments.out.open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in found)
        print(found[-1], flush=True)


if __name__ == "__main__":
    main()
