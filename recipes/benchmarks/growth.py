"""Time a growth step of the large model, and its memory, against loading and saving the same checkpoint.

    python recipes/benchmarks/growth.py --experts 12 --add 2
    python recipes/benchmarks/growth.py --experts 4 --layers 12          # from 2 layers; against the grown checkpoint

A checkpoint with random weights is written to a temporary folder (1.7 GB with 12 experts). Each measurement runs in a
process of its own; memory is the process's peak beyond what it holds after importing fairseq. The held-out pass is not
part of it (``--select random``). Both take turns, --rounds times.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

NUM_LAYERS = 12
LARGE = {
    "_name": "alma_switch_lm_large",
    "decoder_layers": NUM_LAYERS,
    "decoder_embed_dim": 768,
    "decoder_ffn_embed_dim": 3072,
    "decoder_attention_heads": 12,
    "tokens_per_sample": 512,
    "max_target_positions": None,
    "gate_trees": "",
    "moe_freq": 2,
    "finetune_from_model": None,
    "restore_file": "checkpoint_last.pt",
}
VOCAB_SIZE = 50_000


def write_source(path: Path, num_experts: int, num_layers: int = NUM_LAYERS, **more: Any) -> None:
    """Write a checkpoint of the large model with random weights.

    Args:
        path: the file.
        num_experts: in each Switch layer.
        num_layers: of the decoder.
        more: further keys of the checkpoint; of ``cfg``, what stands beside the model's options.
    """
    from fairseq_alma.checkpoints.checkpoint_file import write_checkpoint
    from fairseq_alma.text.model import build_from_config

    config = {**LARGE, "num_experts": num_experts, "decoder_layers": num_layers}
    weights = build_from_config(config, VOCAB_SIZE + 4).state_dict()
    table = torch.randn(weights["decoder.embed_tokens.weight"].shape) * 0.02
    model = {name: torch.randn(tensor.shape) * 0.02 for name, tensor in weights.items()}
    model["decoder.embed_tokens.weight"] = model["decoder.output_projection.weight"] = table
    cfg = {"model": config, **more.pop("cfg", {})}
    write_checkpoint({"model": model, "cfg": cfg, "task_state": {}, "extra_state": {}, **more}, path)


def run_job(job: str, source: Path, out: Path, growth: dict[str, Any]) -> None:
    """Do one measurement in this process and print seconds and MiB."""
    from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint, write_checkpoint
    from fairseq_alma.checkpoints.model_options import GrowOptions
    from fairseq_alma.text.grow import grow

    base = peak_mib()
    begun = time.perf_counter()
    if job == "copy-file":
        write_checkpoint(read_checkpoint(source, mmap=False), out)
    else:
        grow(GrowOptions(path=str(source), out=str(out), select="random", **growth))
    seconds = time.perf_counter() - begun
    print(seconds, peak_mib() - base)


def peak_mib() -> float:
    """Return the largest resident size of this process so far, in MiB (Linux)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    """Run both jobs in turn and print the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--experts", type=int, default=12, help="experts of the source (default: %(default)s)")
    options.add_argument("--add", type=int, default=2, help="experts to add (default: %(default)s)")
    options.add_argument("--layers", type=int, help="add layers to 2, up to so many, instead of experts")
    options.add_argument("--method", help="method of growth (default: copy, of layers zero)")
    options.add_argument("--rounds", type=int, default=3, help="rounds (default: %(default)s)")
    options.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    args = options.parse_args()
    method = args.method or ("copy" if args.layers is None else "zero")
    growth = {"method": method, **({"experts": args.add} if args.layers is None else {"layers": args.layers})}
    if args.job:
        run_job(args.job[0], Path(args.job[1]), Path(args.job[2]), growth)
        return
    with tempfile.TemporaryDirectory() as folder:
        source, out, copy = (Path(folder) / name for name in ("source.pt", "out.pt", "copy.pt"))
        write_source(source, args.experts, NUM_LAYERS if args.layers is None else 2)
        results: dict[str, list[list[float]]] = {"grow": [], "copy-file": []}
        what = ["--method", method, "--add", str(args.add)]
        what += [] if args.layers is None else ["--layers", str(args.layers)]
        for _ in range(args.rounds):
            for job, rows in results.items():
                read = out if job == "copy-file" and args.layers is not None else source
                words = [sys.executable, __file__, *what, "--job", job, str(read), str(out if job == "grow" else copy)]
                output = subprocess.run(words, check=True, capture_output=True, text=True).stdout
                rows.append([float(word) for word in output.split()[-2:]])
            size = (source if args.layers is None else out).stat().st_size / 2**20
            out.unlink()
            copy.unlink()
    grown = f"{args.add} added" if args.layers is None else f"from 2 to {args.layers} layers"
    print(f"large, {args.experts} experts, {grown} by {method}; checkpoint of {size:,.0f} MiB")
    for job, name in (("copy-file", "load and save"), ("grow", "alma-grow")):
        seconds, memory = (statistics.median(column) for column in zip(*results[job], strict=True))
        print(f"{name:13} | {seconds:5.1f} s | peak {memory:,.0f} MiB, {memory / size:.2f} checkpoints")
    ratio = statistics.median(g[0] / c[0] for g, c in zip(results["grow"], results["copy-file"], strict=True))
    print(f"alma-grow takes {ratio:.2f} times as long")


if __name__ == "__main__":
    main()
