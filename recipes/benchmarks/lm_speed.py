"""Measure training updates of this package's language models and of stock fairseq's ``transformer_lm_gpt``.

    OMP_NUM_THREADS=1 python recipes/benchmarks/lm_speed.py --cpu                     # base, fp32, CPU time
    python recipes/benchmarks/lm_speed.py --autocast bf16 --compile --batch-size 32   # on a GPU

Each measurement is fairseq's own ``Trainer.train_step`` (forward, backward, gradient norm, Adam, logging) on sequences
of random tokens. All models have the same active parameters (one expert per token) and alternate within each round;
ratios are computed within a round.
"""

import argparse
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.trainer import Trainer

import fairseq_alma

# Layers, model dimension, feed-forward dimension, heads.
SIZES = {"tiny": (4, 128, 512, 4), "base": (6, 512, 2048, 8), "large": (12, 768, 3072, 12)}
STOCK, SWITCH, TRANSFORMER = "transformer_lm_gpt", "alma_switch_lm", "alma_transformer_lm"


class SpeedTask(LanguageModelingTask):
    """Stock language modeling under autocast, without a stream."""

    autocast: Any = None

    def train_step(self, sample: Any, model: Any, criterion: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute loss and gradients of one batch. fairseq disables autocast around the criterion on a GPU."""
        return super().train_step(sample, model, self.autocast(criterion), *args, **kwargs)


def build_trainer(arch: str, num_experts: int, args: argparse.Namespace, data: str) -> Trainer:
    """Build a trainer as fairseq-train does."""
    layers, model_dim, ffn_dim, heads = SIZES[args.size]
    words = [data, "--task", "language_modeling", "--tokens-per-sample", str(args.tokens_per_sample), "--arch", arch]
    words += ["--decoder-layers", str(layers), "--decoder-embed-dim", str(model_dim), "--dropout", str(args.dropout)]
    words += ["--decoder-attention-heads", str(heads), "--batch-size", str(args.batch_size), "--lr", "1e-4"]
    words += ["--optimizer", "fused_adam", "--adam-betas", "(0.9,0.98)", "--clip-norm", "1.0", "--max-update", "10000"]
    words += ["--cpu"] * args.cpu
    if arch == STOCK:
        words += ["--criterion", "cross_entropy", "--decoder-learned-pos", "--attention-dropout", str(args.dropout)]
        words += ["--decoder-input-dim", str(model_dim), "--decoder-output-dim", str(model_dim)]
        words += ["--share-decoder-input-output-embed", "--decoder-ffn-embed-dim", str(ffn_dim)]
    else:
        words += ["--criterion", "alma_switch_cross_entropy", "--num-experts", str(num_experts)]
        words += ["--compile"] * args.compile
    if arch == SWITCH:
        words += ["--activation-fn", "gelu", "--attention-dropout", str(args.dropout)]
        words += ["--decoder-ffn-embed-dim", str(ffn_dim)]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), words))
    cfg.distributed_training.distributed_world_size = 1
    task = SpeedTask.setup_task(cfg.task)
    device = "cpu" if args.cpu else "cuda"
    dtype = torch.bfloat16 if args.autocast == "bf16" else None
    task.autocast = torch.autocast(device, dtype, enabled=dtype is not None)
    return Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))


def random_sample(args: argparse.Namespace) -> dict[str, Any]:
    """Return a batch of random tokens whose frequencies fall off as in text."""
    ranks = torch.distributions.Pareto(1.0, 0.2).sample((args.batch_size, args.tokens_per_sample + 1))
    tokens = 3 + ranks.clamp(max=args.vocab_size - 4).long()
    lengths = torch.full((args.batch_size,), args.tokens_per_sample)
    source, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    counts = {"nsentences": args.batch_size, "ntokens": target.numel(), "id": torch.arange(args.batch_size)}
    return {**counts, "net_input": {"src_tokens": source, "src_lengths": lengths}, "target": target}


def seconds_per_update(trainer: Trainer, sample: dict[str, Any], updates: int) -> float:
    """Return the seconds of an update: CPU time on a CPU, wall time on a GPU."""
    clock = time.perf_counter if trainer.cuda else time.process_time
    begun = clock()
    with metrics.aggregate("train_inner"):
        for _ in range(updates):
            trainer.train_step([sample])
    if trainer.cuda:
        torch.cuda.synchronize()
    return (clock() - begun) / updates


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--size", choices=SIZES, default="base", help="model size (default: %(default)s)")
    add("--experts", type=int, nargs="+", default=[4, 8, 12], help="numbers of experts (default: 4 8 12)")
    add("--archs", nargs="+", default=[SWITCH, TRANSFORMER], help="architectures to measure (default: both)")
    add("--autocast", choices=("none", "bf16"), default="none", help="autocast format (default: %(default)s)")
    add("--dropout", type=float, default=0.1, help="dropout probability, also of attention (default: %(default)s)")
    add("--compile", action="store_true", help="compile this package's model and criterion")
    add("--batch-size", type=int, default=4, help="sequences per update (default: %(default)s)")
    add("--tokens-per-sample", type=int, default=512, help="tokens per sequence (default: %(default)s)")
    add("--vocab-size", type=int, default=50_000, help="size with fairseq's 4 symbols (default: %(default)s)")
    add("--updates", type=int, default=1, help="updates per round (default: %(default)s)")
    add("--rounds", type=int, default=5, help="measured rounds, after one warm-up (default: %(default)s)")
    add("--cpu", action="store_true", help="run on the CPU")
    args = parser.parse_args()
    fairseq_alma.register()
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    torch.manual_seed(0)
    kinds = [(STOCK, 1), *((arch, each) for arch in args.archs for each in (1, *args.experts))]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "dict.txt").write_text("".join(f"unit{unit} 1\n" for unit in range(args.vocab_size - 4)))
        trainers = {kind: build_trainer(*kind, args, folder) for kind in kinds}
        sample = random_sample(args)
        rounds = [
            {kind: seconds_per_update(trainer, sample, args.updates) for kind, trainer in trainers.items()}
            for _ in range(args.rounds + 1)
        ][1:]
    print("architecture        | experts | seconds per update | tokens per second | speed over stock")
    for kind in kinds:
        seconds = statistics.median(each[kind] for each in rounds)
        ratio = statistics.median(each[STOCK, 1] / each[kind] for each in rounds)
        speed = args.batch_size * args.tokens_per_sample / seconds
        print(f"{kind[0]:19} | {kind[1]:7} | {seconds:18.3f} | {speed:17,.0f} | {ratio:16.2f}")


if __name__ == "__main__":
    main()
