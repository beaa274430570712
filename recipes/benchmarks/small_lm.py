"""Time updates of a small language model: through ``alma-stream``, in a plain PyTorch loop, and of four seeds at once.

    python recipes/benchmarks/small_lm.py                         # width 16, 2 sequences of 128 tokens: 10 CPU minutes
    python recipes/benchmarks/small_lm.py --batch-size 8 --rounds 3

Two layers, the second a Switch layer of 4 experts, each 4 times as wide as the model, a vocabulary of 32 times its
width: 22 thousand parameters at width 16. A figure is CPU time of a whole command, all its processes, less that of the
same command with fewer updates: start, tests and files cancel, what an update takes stays, data and logs included. The
ways take turns, so that a ratio compares what ran within the same minute.
"""

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH = 128
EXPERTS = 4
SHORT = 100


class PlainBlock(nn.Module):
    """A pre-norm layer; experts, where there are some, take the tokens of their gate up to an even share."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate = nn.Linear(width, experts, bias=False) if experts > 1 else None
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, T, M) features and the balance loss."""
        batch, length, width = x.shape
        query, key, value = (
            self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        rows = self.ffn_norm(x).flatten(0, 1)
        if self.gate is None:
            return x + self.experts[0](rows).view_as(x), rows.new_zeros(())
        probs = self.gate(rows).softmax(-1)
        best, expert = probs.max(-1)
        capacity = -(-len(rows) // len(self.experts))
        out, shares = torch.zeros_like(rows), []
        for number, each in enumerate(self.experts):
            taken = (expert == number).nonzero().squeeze(1)
            shares.append(len(taken) / len(rows))
            taken = taken[:capacity]
            out = out.index_copy(0, taken, each(rows[taken]) * best[taken, None])
        balance = len(shares) * (torch.tensor(shares) * probs.mean(0)).sum()
        return x + out.view_as(x), balance


class PlainModel(nn.Module):
    """The language model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        heads = max(1, width // 8)
        self.tokens, self.positions = nn.Embedding(32 * width, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList([PlainBlock(width, heads, 1), PlainBlock(width, heads, EXPERTS)])
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        """Return the loss of (B, T) tokens, nats per token."""
        x, balance = self.tokens(tokens) + self.positions.weight, 0.0
        for block in self.blocks:
            x, of_layer = block(x)
            balance = balance + of_layer
        logits = self.norm(x).flatten(0, 1) @ self.tokens.weight.t()
        return F.cross_entropy(logits, target.flatten()) + 0.01 * balance


def train_plain(width: int, batch_size: int, updates: int) -> None:
    """Train on random tokens, as one would write it in PyTorch alone."""
    torch.manual_seed(1)
    model = PlainModel(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = torch.randint(4, 32 * width, (1000, LENGTH + 1))
    for _ in range(updates):
        batch = data[torch.randint(len(data), (batch_size,))]
        optimizer.zero_grad()
        model(batch[:, :-1], batch[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def stream_command(stream: Path, run: Path, seeds: int, width: int, batch_size: int, updates: int) -> list[str]:
    """Return the call of alma-stream that trains as many seeds."""
    command = ["alma-stream", "--stream", str(stream), "--run", str(run), "--stage", "0", "--save-every", "1000000"]
    command += ["--seed", *map(str, range(1, seeds + 1)), "--", "--arch", "alma_switch_lm_tiny", "--cpu"]
    sizes = {"layers": 2, "embed-dim": width, "ffn-embed-dim": 4 * width, "attention-heads": max(1, width // 8)}
    command += [word for name, size in sizes.items() for word in (f"--decoder-{name}", str(size))]
    command += ["--num-experts", str(EXPERTS), "--criterion", "alma_switch_cross_entropy", "--dropout", "0"]
    command += ["--optimizer", "fused_adam", "--lr", "1e-3", "--clip-norm", "1", "--num-workers", "0"]
    return [*command, "--tokens-per-sample", str(LENGTH), "--batch-size", str(batch_size), "--max-update", str(updates)]


def cpu_seconds(command: Sequence[str]) -> float:
    """Run a command on one core; return the CPU time of it and of all that it starts."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)}: status {status}")
    return used.ru_utime + used.ru_stime


def milliseconds(way: str, updates: int, folder: Path, args: argparse.Namespace) -> float:
    """Return the CPU time of an update of one way: ``plain``, or a number of seeds."""
    spent = []
    for number in (SHORT, SHORT + updates):
        run = folder / "run"
        command = [sys.executable, __file__, "--width", str(args.width), "--batch-size", str(args.batch_size)]
        command += ["--plain-updates", str(number)]
        if way != "plain":
            command = stream_command(folder / "stream", run, int(way), args.width, args.batch_size, number)
        spent.append(cpu_seconds(command))
        shutil.rmtree(run, ignore_errors=True)
    return 1000 * (spent[1] - spent[0]) / updates


def prepare(folder: Path, width: int) -> None:
    """Make a stream of random text with the vocabulary that the width asks for."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8))) for _ in range(200 * width)]
    lines = (" ".join(words[min(int(draw.paretovariate(0.6)), len(words)) - 1] for _ in range(60)) for _ in range(5000))
    (folder / "text.txt").write_text("\n".join(lines))
    command = ["alma-prep-text", str(folder / "text.txt"), "--out", str(folder / "stream"), "--megabatches", "1"]
    command += ["--format", "lines"]
    subprocess.run([*command, "--vocab-size", str(32 * width), "--workers", "1"], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--width", type=int, default=16, help="of the model (default: %(default)s)")
    add("--batch-size", type=int, default=2, help="sequences of an update (default: %(default)s)")
    add("--seeds", type=int, nargs="+", default=[1, 4], help="in one command (default: 1 4)")
    add("--updates", type=int, default=1000, help="that are timed (default: %(default)s)")
    add("--rounds", type=int, default=5, help="of all ways (default: %(default)s)")
    add("--plain-updates", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plain_updates is not None:
        torch.set_num_threads(1)
        train_plain(args.width, args.batch_size, args.plain_updates)
        return
    ways = ["plain", *map(str, args.seeds)]
    rows: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), args.width)
        for round in range(args.rounds):
            for way in ways:
                rows[way].append(milliseconds(way, args.updates, Path(name), args))
            print(f"round {round + 1}: " + ", ".join(f"{way} {rows[way][-1]:.2f} ms" for way in ways), flush=True)
    tokens = args.batch_size * LENGTH
    print(f"width {args.width}, updates of {args.batch_size} x {LENGTH} tokens, torch {torch.__version__}; medians")
    print("way       | CPU ms per update | tokens per CPU second | to plain | to one seed")
    for way in ways:
        trained = 1 if way == "plain" else int(way)
        to = [
            statistics.median(mine / theirs for mine, theirs in zip(rows[way], rows[of], strict=True))
            for of in ("plain", ways[1])
        ]
        label = way if way == "plain" else f"{way} seed{'s' * (trained > 1)}"
        spent = statistics.median(rows[way])
        print(f"{label:9} | {spent:17.2f} | {trained * tokens / spent * 1000:21,.0f} | {to[0]:8.2f} | {to[1]:11.2f}")


if __name__ == "__main__":
    main()
