"""Time training updates of the Switch language models beside stock fairseq's ``transformer_lm_gpt``.

    python recipes/benchmarks/lm_speed.py                      # on a GPU: bf16, base and large, 8 experts; 5 minutes
    python recipes/benchmarks/lm_speed.py --cpu                # fp32 and bf16, base, 4, 8 and 12 experts; 5 minutes
    python recipes/benchmarks/lm_speed.py --cpu --sizes tiny --seconds 5     # tries the command itself

Each measurement is fairseq's own ``Trainer.train_step`` (forward, backward, gradient norm, Adam, logging) on sequences
of 512 random tokens of 50,000. All models have the same active parameters (one expert per token) and take turns, so
that a ratio compares what ran at the same time. Weights are fp32; bf16 is ``--autocast bf16``, for stock as well.
Model FLOPs are those of `fairseq_alma.metrics`, without recomputation.
"""

import argparse
import contextlib
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.trainer import Trainer
from omegaconf import open_dict

import fairseq_alma
from fairseq_alma.metrics import SwitchLMShape
from fairseq_alma.training.autocast import Autocast
from fairseq_alma.training.feature import Features

NUM_UNITS = 50_000
# layers, model dimension, feed-forward dimension, heads
SIZES = {"tiny": (4, 128, 512, 4), "base": (6, 512, 2048, 8), "large": (12, 768, 3072, 12)}
# Dense bf16 rates in TFLOP/s from the vendors' datasheets
PEAKS = {"H100": 989.4, "H200": 989.4, "A100": 312.0}


STOCK, OURS = "transformer_lm_gpt", "alma_switch_lm"


class SpeedTask(LanguageModelingTask):
    """Stock language modeling with the precision of ``alma_lm``, without a stream."""

    def train_step(self, sample: Any, model: Any, criterion: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute loss and gradients of one batch, as ``alma_lm`` does."""
        features = Features([Autocast("bf16")] if self.args.autocast == "bf16" else [])
        return super().train_step(sample, model, features.around(criterion, model), *args, **kwargs)


class Row(NamedTuple):
    """What is measured: a model, 1 expert standing for stock, in a precision."""

    num_experts: int
    precision: str

    @property
    def arch(self) -> str:
        """Name of the architecture."""
        return OURS if self.num_experts > 1 else STOCK


def build_trainer(num_experts: int, size: str, data: Path, args: argparse.Namespace) -> Trainer:
    """Build what fairseq-train would build for this size and number of experts."""
    layers, model_dim, ffn_dim, heads = SIZES[size]
    command = [str(data), "--task", "language_modeling", "--tokens-per-sample", str(args.tokens_per_sample)]
    command += ["--decoder-layers", str(layers), "--decoder-embed-dim", str(model_dim)]
    command += ["--decoder-ffn-embed-dim", str(ffn_dim), "--decoder-attention-heads", str(heads)]
    command += ["--dropout", "0.1", "--attention-dropout", str(args.attention_dropout)]
    command += ["--batch-size", str(args.batch_size)]
    command += ["--optimizer", args.optimizer, "--adam-betas", "(0.9,0.98)", "--clip-norm", "1.0", "--lr", "1e-4"]
    command += ["--lr-scheduler", "polynomial_decay", "--total-num-update", "10000", "--max-update", "10000"]
    command += ["--cpu"] if args.cpu else []
    if num_experts == 1:
        command += ["--arch", STOCK, "--criterion", "cross_entropy", "--share-decoder-input-output-embed"]
        dims = ["--decoder-input-dim", str(model_dim), "--decoder-output-dim", str(model_dim)]
        command += [*dims, "--decoder-learned-pos"]
    else:
        command += ["--arch", "alma_switch_lm_base", "--criterion", "alma_switch_cross_entropy"]
        command += ["--num-experts", str(num_experts), "--activation-fn", "gelu"]
        command += ["--compile"] if args.compile else []
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), command))
    cfg.distributed_training.distributed_world_size = 1
    with open_dict(cfg.task):
        cfg.task.autocast = "none"
    task = SpeedTask.setup_task(cfg.task)
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
    """Read the command line; what fits the device fills in what is not given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--sizes", nargs="+", choices=SIZES, help="model sizes (default: base large; --cpu: base)")
    add("--experts", type=int, nargs="+", help="experts per Switch layer (default: 8; --cpu: 4 8 12)")
    add("--precision", nargs="+", choices=("fp32", "bf16"), help="(default: bf16; --cpu: fp32, and bf16 if it has it)")
    add("--batch-size", type=int, help="sequences per update (default: 128; --cpu: 4)")
    add("--tokens-per-sample", type=int, default=512, help="tokens per sequence (default: %(default)s)")
    add("--attention-dropout", type=float, default=0.1, help="(default: %(default)s)")
    add("--optimizer", default="fused_adam", choices=("adam", "fused_adam"), help="of all (default: %(default)s)")
    add("--compile", action="store_true", help="torch.compile model and criterion of ours")
    add("--updates", type=int, help="updates per round (default: 10; --cpu: 1)")
    add("--rounds", type=int, default=20, help="counted rounds at most, after one more (default: %(default)s)")
    add("--seconds", type=float, default=240.0, help="begin no further round after this (default: %(default)s)")
    add("--peak-tflops", type=float, help="the card's peak; known for " + ", ".join(PEAKS))
    add("--profile", type=int, default=0, metavar="ROWS", help="also print this many rows of a profile")
    add("--cpu", action="store_true", help="run on the CPU")
    args = parser.parse_args()
    if not args.cpu and not torch.cuda.is_available():
        parser.error("no GPU was found; give --cpu")
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    args.sizes = args.sizes or (["base"] if args.cpu else ["base", "large"])
    args.experts = args.experts or ([4, 8, 12] if args.cpu else [8])
    args.precision = args.precision or (["fp32", *["bf16"] * has_bf16] if args.cpu else ["bf16"])
    args.batch_size = args.batch_size or (4 if args.cpu else 128)
    args.updates = args.updates or (1 if args.cpu else 10)
    return args


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
    trainers = {num_experts: build_trainer(num_experts, size, data, args) for num_experts in (1, *args.experts)}
    times: dict[Row, list[float]] = {
        Row(num_experts, precision): [] for precision in args.precision for num_experts in trainers
    }
    deadline = time.perf_counter() + args.seconds / len(args.sizes)
    for round in range(args.rounds + 1):
        if round > 1 and time.perf_counter() > deadline:
            break
        for row, spent in times.items():
            trainer = trainers[row.num_experts]
            trainer.task.args.autocast = "bf16" if row.precision == "bf16" else "none"
            seconds = seconds_per_update(trainer, samples, trainer.cuda)
            spent.extend([seconds] if round else [])
    for row, spent in times.items():
        print_row(size, row, spent, times, peak, args)
    if args.profile:
        for num_experts, trainer in trainers.items():
            print(f"\nprofile of {size} {Row(num_experts, args.precision[-1])}")
            profile(trainer, samples[0], args.profile)


def print_row(
    size: str, row: Row, spent: list[float], times: dict[Row, list[float]], peak: Optional[float], args: Any
) -> None:
    """Print the medians over rounds; ratios are taken within each round."""
    seconds, tokens = statistics.median(spent), args.batch_size * args.tokens_per_sample
    shape = shape_of(size, row.num_experts, args)
    tflops = shape.train_flops_per_token * tokens / seconds / 1e12
    ratios = [
        f"{statistics.median(a / b for a, b in zip(times[Row(1, precision)], spent, strict=True)):5.2f}"
        for precision in (row.precision, args.precision[0])
    ]
    print(
        f"{size:5} | {row.arch:18} | {row.num_experts:7} | {row.precision:4} | {shape.num_params / 1e6:6.0f} M "
        f"| {1000 * seconds:8.1f} ms | {tokens / seconds:11,.0f} | {tflops:7.2f} "
        f"| {f'{tflops / peak:.1%}' if peak else 'unknown':>7} | {ratios[0]} | {ratios[1]}",
        flush=True,
    )


def main() -> None:
    """Measure every size and print the table."""
    args = parse_args()
    fairseq_alma.register()
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    peak = peak_tflops(args)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        (data / "dict.txt").write_text("".join(f"unit{unit} 1\n" for unit in range(NUM_UNITS)))
        shape = f"{args.batch_size} x {args.tokens_per_sample}"
        print(f"batches of {shape} tokens, {args.optimizer}, torch {torch.__version__}")
        print(f"ratio: speed over stock in the same precision, and over stock in {args.precision[0]}, in the same run")
        print(
            "size  | architecture       | experts | prec | params   | per update  | tokens/s    | TFLOP/s | of peak "
            "| ratio | ratio"
        )
        for size in args.sizes:
            measure(size, args, data, peak)
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
