"""Compare the CPU time of a Switch layer with that of a dense feed-forward layer of one expert's size.

    OMP_NUM_THREADS=1 python recipes/benchmarks/switch_layer.py --experts 4 8 12

The script measures forward and backward passes of 4096 tokens, 512 -> 2048 -> 512. The layers alternate within each
round, and ratios are computed within a round, so that a drift of the machine's speed does not favour one layer.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.moe import SwitchLayer
from fairseq_alma.text.transformer_lm import GatedFeedForward


def cpu_seconds(module: Any, x: Tensor) -> float:
    """Return the CPU time of one forward and backward pass of all threads."""
    x = x.clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    begun = time.process_time()
    output = module(x)
    output = output[0] if isinstance(output, tuple) else output
    output.backward(torch.full_like(x, 0.01))
    return time.process_time() - begun


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per pass (default: %(default)s)")
    parser.add_argument("--model-dim", type=int, default=512, help="model dimension (default: %(default)s)")
    parser.add_argument("--ffn-dim", type=int, default=2048, help="hidden dimension (default: %(default)s)")
    parser.add_argument("--experts", type=int, nargs="+", default=[4, 8, 12], help="numbers of experts")
    parser.add_argument("--gated", action="store_true", help="SwiGLU without biases")
    parser.add_argument(
        "--rounds", type=int, default=10, help="measured rounds, after two warm-ups (default: %(default)s)"
    )
    args = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(args.tokens, args.model_dim)
    sizes = args.model_dim, args.ffn_dim
    relu = nn.Sequential(nn.Linear(*sizes), nn.ReLU(), nn.Linear(*sizes[::-1]))  # as in the paper
    layers: dict[int, Any] = {0: GatedFeedForward(*sizes) if args.gated else relu}
    layers |= {e: SwitchLayer(*sizes, GateTree.flat(e), gated=args.gated).train() for e in args.experts}
    rounds = [{e: cpu_seconds(layer, x) for e, layer in layers.items()} for _ in range(args.rounds + 2)][2:]
    print(f"dense feed-forward layer: {1000 * statistics.median(each[0] for each in rounds):.1f} ms of CPU time")
    print("experts | Switch layer, ms | of dense | tokens dropped")
    for e in args.experts:
        milliseconds = 1000 * statistics.median(each[e] for each in rounds)
        ratio = statistics.median(each[e] / each[0] for each in rounds)
        dropped = layers[e](x)[2].num_dropped / args.tokens
        print(f"{e:7} | {milliseconds:16.1f} | {ratio:8.2f} | {dropped:.1%}")


if __name__ == "__main__":
    main()
