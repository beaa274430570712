"""Time a Switch layer against a dense feed-forward layer and against one-hot einsum dispatch, on a CPU or a GPU.

    python recipes/benchmarks/switch_layer.py

Forward and backward of 4096 tokens, 512 -> 2048 -> 512, with 4, 8 and 12 experts. The layers take turns within each
round, and ratios are taken round by round, so a machine whose speed drifts does not favour one of them.
"""

import argparse
import statistics
import time
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_alma.growth.gate_tree import GateTree
from fairseq_alma.moe.dispatch import expert_capacity
from fairseq_alma.moe.switch_layer import SwitchLayer


class DenseFFN(nn.Module):
    """One expert's feed-forward network for all tokens."""

    def __init__(self, model_dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(model_dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, model_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (S, M) to (S, M)."""
        return self.fc2(F.relu(self.fc1(x)))


class EinsumSwitchLayer(nn.Module):
    """The Switch layer's weights behind a one-hot (tokens x experts x places) dispatch, as in fairscale's MOELayer."""

    def __init__(self, layer: SwitchLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Map (S, M) to (S, M)."""
        experts, num_experts = self.layer.experts, self.layer.experts.num_experts
        capacity = expert_capacity(len(x), num_experts, self.layer.capacity_factor)
        probs = F.softmax(F.linear(x.float(), self.layer.gate.weight.float()), dim=-1)
        chosen = F.one_hot(probs.argmax(-1), num_experts)
        place = (chosen.cumsum(0) - 1) * chosen
        chosen = chosen * (place < capacity)
        weight = (probs * chosen).sum(1)
        place_one_hot = F.one_hot((place * chosen).sum(1), capacity).to(x.dtype)
        combine = torch.einsum("s,se,sc->sec", weight.to(x.dtype), chosen.to(x.dtype), place_one_hot)
        rows = torch.einsum("sec,sm->ecm", (combine != 0).to(x.dtype), x)
        hidden = F.relu(torch.einsum("ecm,efm->ecf", rows, experts.fc1_weight) + experts.fc1_bias[:, None])
        out = torch.einsum("ecf,emf->ecm", hidden, experts.fc2_weight) + experts.fc2_bias[:, None]
        return torch.einsum("sec,ecm->sm", combine, out)


def output_of(layer: SwitchLayer) -> Callable[[Tensor], Tensor]:
    """Return the layer without what it says of its routing."""
    return lambda x: layer(x)[0]


def seconds(function: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> float:
    """Time one forward and backward pass."""
    x = x.clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    upstream = torch.full_like(x, 0.01)
    _wait(x)
    begun = time.perf_counter()
    function(x).backward(upstream)
    _wait(x)
    return time.perf_counter() - begun


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per pass (default: %(default)s)")
    parser.add_argument("--model-dim", type=int, default=512, help="model dimension (default: %(default)s)")
    parser.add_argument("--ffn-dim", type=int, default=2048, help="hidden dimension (default: %(default)s)")
    parser.add_argument("--experts", type=int, nargs="+", default=[4, 8, 12], help="numbers of experts")
    parser.add_argument("--rounds", type=int, default=10, help="counted rounds, after two more (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16 (default: %(default)s)")
    args = parser.parse_args()

    torch.manual_seed(0)
    options = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    x = torch.randn(args.tokens, args.model_dim, **options)
    dense = DenseFFN(args.model_dim, args.ffn_dim).to(**options)
    times: dict[str, list[float]] = {}
    layers = {
        e: SwitchLayer(args.model_dim, args.ffn_dim, GateTree.flat(e)).to(**options).train() for e in args.experts
    }
    for layer in layers.values():
        torch.testing.assert_close(EinsumSwitchLayer(layer)(x), layer(x)[0], rtol=0.05, atol=0.05)
    for counted in [False] * 2 + [True] * args.rounds:
        row = {"dense": seconds(dense, dense, x)}
        for e, layer in layers.items():
            row[f"switch {e}"] = seconds(output_of(layer), layer, x)
            row[f"einsum {e}"] = seconds(EinsumSwitchLayer(layer), layer, x)
        if counted:
            for name, value in row.items():
                times.setdefault(name, []).append(value)

    print(f"{args.tokens} tokens, {args.model_dim} -> {args.ffn_dim} -> {args.model_dim}, {args.dtype}, {args.device}")
    print(f"dense feed-forward layer: {1000 * statistics.median(times['dense']):.1f} ms (forward and backward, median)")
    print("experts | Switch layer, ms | of dense | einsum dispatch, ms | einsum over Switch | tokens dropped")
    for e, layer in layers.items():
        switch, einsum = times[f"switch {e}"], times[f"einsum {e}"]
        of_dense = statistics.median(a / b for a, b in zip(switch, times["dense"], strict=True))
        speedup = statistics.median(a / b for a, b in zip(einsum, switch, strict=True))
        dropped = layer(x)[2].num_dropped / args.tokens
        print(
            f"{e:7} | {1000 * statistics.median(switch):16.1f} | {of_dense:8.2f} "
            f"| {1000 * statistics.median(einsum):19.1f} | {speedup:18.2f} | {dropped:.1%}"
        )


if __name__ == "__main__":
    main()
