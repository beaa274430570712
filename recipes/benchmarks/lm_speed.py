"""Time training updates of the Switch language models beside stock fairseq's ``transformer_lm_gpt``.

    python recipes/benchmarks/lm_speed.py                      # on a GPU: bf16, batches that fill it
    python recipes/benchmarks/lm_speed.py --cpu --sizes tiny --batch-size 4 --updates 3     # tries the command itself

Each measurement is fairseq's own ``Trainer.train_step`` (forward, backward, gradient norm, Adam, logging) on sequences
of 512 random tokens, 50,000 units. Both models have the same active parameters (one expert per token) and take turns.
Model FLOPs are those of `fairseq_alma.metrics.flops`, without recomputation.
"""

import argparse
import contextlib
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.trainer import Trainer

import fairseq_alma
from fairseq_alma.metrics.flops import SwitchLMShape

NUM_UNITS = 50_000
# layers, model dimension, feed-forward dimension, heads
SIZES = {"tiny": (4, 128, 512, 4), "base": (6, 512, 2048, 8), "large": (12, 768, 3072, 12)}
# Dense bf16 rates in TFLOP/s from the vendors' datasheets
PEAKS = {"H100": 989.4, "H200": 989.4, "A100": 312.0}


def build_trainer(arch: str, size: str, data: Path, args: argparse.Namespace) -> Trainer:
    """Build what fairseq-train would build for this architecture and size."""
    layers, model_dim, ffn_dim, heads = SIZES[size]
    command = [str(data), "--task", "language_modeling", "--tokens-per-sample", str(args.tokens_per_sample)]
    command += ["--decoder-layers", str(layers), "--decoder-embed-dim", str(model_dim)]
    command += ["--decoder-ffn-embed-dim", str(ffn_dim), "--decoder-attention-heads", str(heads)]
    command += ["--dropout", "0.1", "--attention-dropout", "0.1", "--batch-size", str(args.batch_size)]
    command += ["--optimizer", "adam", "--adam-betas", "(0.9,0.98)", "--clip-norm", "1.0", "--lr", "1e-4"]
    command += ["--lr-scheduler", "polynomial_decay", "--total-num-update", "10000", "--max-update", "10000"]
    command += ["--cpu"] if args.cpu else ["--bf16"]
    if arch == "transformer_lm_gpt":
        command += ["--arch", arch, "--criterion", "cross_entropy", "--share-decoder-input-output-embed"]
        command += [
            "--decoder-input-dim",
            str(model_dim),
            "--decoder-output-dim",
            str(model_dim),
            "--decoder-learned-pos",
        ]
    else:
        command += ["--arch", "alma_switch_lm_base", "--criterion", "alma_switch_cross_entropy"]
        command += ["--num-experts", str(args.experts), "--activation-fn", "gelu"]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), command))
    task = tasks.setup_task(cfg.task)
    return Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))


def random_sample(args: argparse.Namespace, generator: np.random.Generator) -> dict[str, Any]:
    """Return a batch of random tokens whose frequencies fall off as in text."""
    shape = (args.batch_size, args.tokens_per_sample + 1)
    tokens = torch.from_numpy(4 + np.minimum(generator.zipf(1.2, shape), NUM_UNITS) - 1)
    lengths = torch.full((args.batch_size,), args.tokens_per_sample)
    return {
        "id": torch.arange(args.batch_size),
        "nsentences": args.batch_size,
        "ntokens": args.batch_size * args.tokens_per_sample,
        "net_input": {"src_tokens": tokens[:, :-1].contiguous(), "src_lengths": lengths},
        "target": tokens[:, 1:].contiguous(),
    }


def seconds_per_update(trainer: Trainer, samples: list[dict[str, Any]], cuda: bool) -> float:
    """Time updates, one per sample."""
    with metrics.aggregate("train_inner"):
        if cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        for sample in samples:
            trainer.train_step([sample])
        if cuda:
            torch.cuda.synchronize()
    return (time.perf_counter() - begun) / len(samples)


def shape_of(size: str, num_experts: int, args: argparse.Namespace) -> SwitchLMShape:
    """Return the sizes behind the formulas; one expert and no gate describe the stock model."""
    layers, model_dim, ffn_dim, _ = SIZES[size]
    num_switch_layers = layers // 2 if num_experts > 1 else 0
    return SwitchLMShape(
        model_dim=model_dim,
        ffn_dim=ffn_dim,
        num_layers=layers,
        vocab_size=NUM_UNITS + 4,
        tokens_per_sample=args.tokens_per_sample,
        gate_rows=(num_experts,) * num_switch_layers,
        num_experts=(num_experts,) * num_switch_layers,
        learned_positions=args.tokens_per_sample + 2,
    )


def profile(trainer: Trainer, sample: dict[str, Any], rows: int) -> None:
    """Print where the time of one update goes."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if trainer.cuda else []
    with torch.profiler.profile(activities=activities) as profiler, metrics.aggregate("train_inner"):
        for _ in range(3):
            trainer.train_step([sample])
    sort_by = "self_cuda_time_total" if trainer.cuda else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=sort_by, row_limit=rows, max_name_column_width=70))


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["base", "large"], choices=SIZES, help="model sizes")
    parser.add_argument("--experts", type=int, default=8, help="experts per Switch layer (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="sequences per update (default: %(default)s)")
    parser.add_argument("--tokens-per-sample", type=int, default=512, help="tokens per sequence (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=10, help="updates per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after one more (default: %(default)s)")
    parser.add_argument("--peak-tflops", type=float, help="the card's peak; known for " + ", ".join(PEAKS))
    parser.add_argument("--profile", type=int, default=0, metavar="ROWS", help="also print this many rows of a profile")
    parser.add_argument("--cpu", action="store_true", help="run in fp32 on the CPU")
    return parser.parse_args()


def peak_tflops(args: argparse.Namespace) -> Optional[float]:
    """Return the card's peak rate, or None where it is not known."""
    if args.peak_tflops or args.cpu:
        return args.peak_tflops
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}")
    return next((peak for card, peak in PEAKS.items() if card in name), None)


def measure(size: str, args: argparse.Namespace, data: Path, peak: Optional[float]) -> None:
    """Print the rows of one size."""
    generator = np.random.default_rng(0)
    samples = [random_sample(args, generator) for _ in range(args.updates)]
    experts = {"transformer_lm_gpt": 1, "alma_switch_lm": args.experts}
    trainers = {arch: build_trainer(arch, size, data, args) for arch in experts}
    times: dict[str, list[float]] = {arch: [] for arch in experts}
    for counted in [False] + [True] * args.rounds:
        for arch, trainer in trainers.items():
            spent = seconds_per_update(trainer, samples, trainer.cuda)
            if counted:
                times[arch].append(spent)
    tokens = args.batch_size * args.tokens_per_sample
    for arch, spent_in_rounds in times.items():
        spent = statistics.median(spent_in_rounds)
        ratio = statistics.median(a / b for a, b in zip(times["transformer_lm_gpt"], spent_in_rounds, strict=True))
        shape = shape_of(size, experts[arch], args)
        tflops = shape.train_flops_per_token * tokens / spent / 1e12
        share = f"{tflops / peak:.1%}" if peak else "unknown"
        print(
            f"{size:5} | {arch:18} | {shape.num_params / 1e6:6.0f} M | {1000 * spent:8.1f} ms "
            f"| {tokens / spent:11,.0f} | {tflops:7.1f} | {share:>7} | {ratio:5.2f}",
            flush=True,
        )
    if args.profile:
        for arch, trainer in trainers.items():
            print(f"\nprofile of {size} {arch}")
            profile(trainer, samples[0], args.profile)


def main() -> None:
    """Measure every size and print the table."""
    args = parse_args()
    fairseq_alma.register()
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    peak = peak_tflops(args)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        (data / "dict.txt").write_text("".join(f"unit{unit} 1\n" for unit in range(NUM_UNITS)))
        print(
            f"batches of {args.batch_size} x {args.tokens_per_sample} tokens; ratio: speed over stock, in the same run"
        )
        print("size  | architecture       | params   | per update  | tokens/s    | TFLOP/s | of peak | ratio")
        for size in args.sizes:
            measure(size, args, data, peak)
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
