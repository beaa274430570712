"""Time alma-stream on MNIST against a plain PyTorch loop, ensembles against one model, mixtures against a loop.

    python recipes/benchmarks/image_speed.py --source corpora/mnist

Whole commands are timed, from their start to their end, in a folder that is removed afterwards:

- sm, ens: alma-stream with one model and with five, B = 500; each epoch is validated, each stage tested and recorded;
- processes: alma-stream with one model, and with five that two processes of one thread each train, three and two of
  them side by side;
- seeds: alma-stream with one model, for one seed and for three side by side;
- plain: this file's own loop over the same mega-batches, the updates of sm and nothing else;
- gmoe: alma-stream with a growing mixture with soft gates, B = 50, one expert more in each layer at each stage;
- looped: the updates of gmoe and nothing else, by a model that loops over its experts.

Commands that are compared take turns, and ratios are taken round by round, of wall time and of the processor's time in
user mode. On a machine that other work shares only the latter tells anything, with one thread: OpenMP threads that wait
for a busy core cost factors.
"""

import argparse
import copy
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_alma.data.image_stream import ImageStream

BATCH_SIZE = 128


class PlainMixture(nn.Module):
    """The soft mixture of alma_moe_mlp as one would write it down: a module for each expert and for each choice.

    Args:
        in_features: of each image.
        out_features: of each expert.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.experts = nn.ModuleList([nn.Linear(in_features, out_features)])
        self.choices = nn.ModuleList()
        self.paths: list[list[tuple[int, int]]] = [[]]  # of each expert: numbers of choices, and which child of each

    def split(self, expert: int) -> None:
        """Make two equal experts of one, under a new choice."""
        choice, path = len(self.choices), self.paths[expert]
        self.choices.append(nn.Linear(self.in_features, 2))
        self.experts.append(copy.deepcopy(self.experts[expert]))
        self.paths[expert], new_path = [*path, (choice, 0)], [*path, (choice, 1)]
        self.paths.append(new_path)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, I) to (B, O), one expert after the other."""
        log_probs = [F.log_softmax(choice(x), dim=1) for choice in self.choices]
        out = torch.zeros(len(x), self.out_features)
        for expert, path in zip(self.experts, self.paths, strict=True):
            log_prob = sum((log_probs[choice][:, child] for choice, child in path), torch.zeros(len(x)))
            out = out + log_prob.exp()[:, None] * F.relu(expert(x))
        return out


def plain(stream: ImageStream, width: int, epochs: int, is_growing: bool) -> None:
    """Do the updates of learner sm, or those of gmoe that grows in each stage, as one would write them down."""
    pixels, classes = math.prod(stream.shape), stream.num_classes
    if is_growing:
        mixtures = [PlainMixture(pixels, width), PlainMixture(width, width)]
        network = nn.Sequential(nn.Flatten(), *mixtures, nn.Linear(width, classes))
    else:
        mixtures = []
        hidden = [nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        network = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, classes))
    for megabatch in range(stream.num_megabatches):
        for mixture in mixtures:
            if megabatch:
                mixture.split(int(torch.randint(len(mixture.experts), ())))
        optimizer = torch.optim.Adadelta(network.parameters(), lr=1.0)
        rows = stream.train_indices([megabatch])
        images = (torch.from_numpy(stream.images[rows]).float() / 255 - stream.mean[0]) / stream.std[0]
        labels = torch.from_numpy(stream.labels[rows])
        for _ in range(epochs):
            for batch in torch.randperm(len(labels)).split(BATCH_SIZE):
                optimizer.zero_grad()
                F.cross_entropy(network(images[batch]), labels[batch]).backward()
                optimizer.step()


def seconds(command: list[str], threads: int) -> tuple[float, float]:
    """Run a command and return its wall time and its user time."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def compare(args: argparse.Namespace, folder: Path) -> None:
    """Prepare the streams, time the commands in turn, print a table."""
    streams = {"sm": folder / "stream-500", "gmoe": folder / "stream-50"}
    for path, megabatches in zip(streams.values(), ("500", "50"), strict=True):
        prepare = ["alma-prep-images", "mnist", "--source", str(args.source), "--out", str(path)]
        seconds([*prepare, "--megabatches", megabatches], args.threads)

    def own_loop(stream: Path, epochs: int, *options: str) -> list[str]:
        words = ["--plain", str(stream), "--width", str(args.width), "--epochs", str(epochs)]
        return [sys.executable, __file__, *words, *options]

    def alma(learner: str, stream: Path, epochs: int, *options: str) -> list[str]:
        run = tempfile.mkdtemp(dir=folder)
        words = ["--stream", str(stream), "--learner", learner, "--run", run, *options]
        return ["alma-stream", *words, "--", "--width", str(args.width), "--max-epoch", str(epochs), "--cpu"]

    times: dict[str, list[tuple[float, float]]] = {}
    for number in range(args.rounds):
        for what in args.what:
            if what == "seeds":
                stream = streams["sm"]
                seeds = {"one": ["1"], "three": ["1", "2", "3"]}
                commands = {name: alma("sm", stream, args.epochs, "--seed", *each) for name, each in seeds.items()}
            elif what == "processes":
                stream = streams["sm"]
                dealt = ("--jobs", "2", "--side-by-side", "3")
                commands = {
                    "single": alma("sm", stream, args.epochs),
                    "dealt": alma("ens", stream, args.epochs, *dealt),
                }
            elif what == "sm":
                stream = streams["sm"]
                commands = {
                    "plain": own_loop(stream, args.epochs),
                    "sm": alma("sm", stream, args.epochs),
                    "ens": alma("ens", stream, args.epochs),
                }
            else:
                stream = streams["gmoe"]
                commands = {
                    "looped": own_loop(stream, args.growing_epochs, "--growing"),
                    "gmoe": alma("gmoe", stream, args.growing_epochs, "--grow-every", "1"),
                }
            for name, command in commands.items():
                wall, user = seconds(command, 1 if name == "dealt" else args.threads)
                times.setdefault(name, []).append((wall, user))
                print(f"round {number}, {name}: {wall:.1f} s, {user:.1f} s user", flush=True)
    print(f"width {args.width}, {args.epochs} epochs (gmoe: {args.growing_epochs}), {args.threads} threads; medians")
    for name, base, what in (
        ("sm", "plain", "alma-stream with one model, over the plain loop"),
        ("ens", "sm", "alma-stream with five models, over one"),
        ("dealt", "single", "alma-stream with five models by two processes, over one"),
        ("three", "one", "alma-stream with three seeds side by side, over one"),
        ("looped", "gmoe", "the loop over experts, over alma-stream"),
    ):
        for kind, of in enumerate(("", ", user time")) if name in times else ():
            here, there = ([each[kind] for each in times[side]] for side in (name, base))
            ratio = statistics.median(a / b for a, b in zip(here, there, strict=True))
            print(f"{what}{of}: {ratio:.2f} ({statistics.median(here):.1f} s, {statistics.median(there):.1f} s)")


def main() -> None:
    """Read the options and run what they say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, default=Path("corpora/mnist"), help="MNIST (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="units of each layer (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=100, help="of each stage (default: %(default)s)")
    parser.add_argument("--growing-epochs", type=int, default=10, help="of the stages of gmoe (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="turns (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of all commands (default: all cores)")
    parser.add_argument(
        "--what",
        nargs="+",
        default=["sm", "gmoe"],
        choices=["sm", "processes", "seeds", "gmoe"],
        help="default: sm gmoe",
    )
    parser.add_argument("--plain", type=Path, metavar="STREAM", help="do the updates of a plain loop and nothing else")
    parser.add_argument("--growing", action="store_true", help="with --plain: those of gmoe")
    args = parser.parse_args()
    if args.plain:
        plain(ImageStream.open(args.plain), args.width, args.epochs, args.growing)
    else:
        with tempfile.TemporaryDirectory() as folder:
            compare(args, Path(folder))


if __name__ == "__main__":
    main()
