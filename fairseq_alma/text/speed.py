"""How fast Switch language models are trained on this machine: what ``alma-stream --hours`` plans with.

A process of its own measures, because it needs torch, which alma-stream itself does without until it trains.
"""

import json
import subprocess
import sys
import time
from typing import Callable, Sequence

from fairseq_alma.errors import AlmaError
from fairseq_alma.text.model_size import Speed

OVERHEAD = 1.15
"""Of fairseq's trainer around an update, and of saving."""
_WARM, _TIMED, _LEAST_SECONDS = 2, 3, 1.0


def measure(shapes: Sequence[Sequence[int]], tokens_per_update: int, length: int, on_cpu: bool) -> Speed:
    """Return how fast models are trained.

    Args:
        shapes: of each model width, layers, vocabulary size and experts.
        tokens_per_update: of all sequences of an update.
        length: tokens of a sequence.
        on_cpu: also where there is a GPU.

    Raises:
        AlmaError: it failed.
    """
    job = json.dumps({"shapes": [[*shape] for shape in shapes], "batch": max(1, tokens_per_update // length),
                      "length": length, "on_cpu": on_cpu})  # fmt: skip
    started = time.perf_counter()
    words = [sys.executable, "-c", "from fairseq_alma.text import speed; speed.main()"]
    done = subprocess.run(words, input=job, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise AlmaError(f"--hours: the speed of this machine could not be measured ({reason:.200}); give --size")
    found = json.loads(done.stdout.splitlines()[-1])
    taken = time.perf_counter() - started
    return Speed(found["costs"], taken - found["measuring"], taken)


def main() -> None:
    """Measure what standard input names, in the process that `measure` starts."""
    from fairseq_alma.text import model  # noqa: F401 - a start has these imports

    job, started = json.load(sys.stdin), time.perf_counter()
    costs = [seconds_per_token(shape, job) for shape in job["shapes"]]
    print(json.dumps({"costs": costs, "measuring": time.perf_counter() - started}))


def seconds_per_token(shape: Sequence[int], job: dict, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return what a token's training takes; see `measure`."""
    import torch

    from fairseq_alma.text.model import build_from_config
    from fairseq_alma.training.average import WeightAverage

    width, layers, vocab_size, num_experts = shape
    device = "cuda" if torch.cuda.is_available() and not job["on_cpu"] else "cpu"
    config = {
        "mup": True, "decoder_embed_dim": width, "decoder_ffn_embed_dim": 4 * width, "decoder_layers": layers,
        "decoder_attention_heads": max(1, width // 32), "num_experts": num_experts, "gate_trees": "", "dropout": 0.0,
        "tokens_per_sample": job["length"], "max_target_positions": None,
    }  # fmt: skip
    model = build_from_config(config, vocab_size, device).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    average = WeightAverage(**WeightAverage.USUAL)
    tokens = torch.randint(4, vocab_size, (job["batch"], job["length"] + 1), device=device)

    def update(number: int) -> None:
        logits, extra = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + 0.01 * sum(each.balance_loss for each in extra["switch"])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.after_step(model, number)
        if device == "cuda":
            torch.cuda.synchronize()

    for number in range(_WARM):
        update(number)
    started, number = clock(), 0
    while number < _TIMED or clock() - started < _LEAST_SECONDS:
        update(_WARM + number)
        number += 1
    return OVERHEAD * (clock() - started) / (number * job["batch"] * job["length"])
