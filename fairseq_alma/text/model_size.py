"""How large a model, and how often through its text: by how much there is to read, by a size, or by time.

Sizes are the parameters of Switch language models that widen and deepen together; which is best for a time follows from
the form of Hoffmann et al. 2022 and from speeds that are measured where it runs. Neither torch nor fairseq, but in the
process that measures.
"""

import itertools
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, Sequence

from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import NUM_FAIRSEQ_SYMBOLS
from fairseq_alma.errors import AlmaError
from fairseq_alma.learners.learner import Stage
from fairseq_alma.metrics import SwitchLMShape

NUM_EXPERTS, MOE_FREQ, HEAD_WIDTH, LENGTH = 4, 2, 32, 128
"""LENGTH: tokens of a sequence."""
TOKENS_PER_PARAMETER = 20
"""``--size auto``: tokens that are read for each parameter that a token uses (Hoffmann et al. 2022)."""
WIDTHS = (*range(32, 512, 32), *range(512, 1024, 64), *range(1024, 4097, 256))
MOST_PASSES, LEAST_UPDATES = 10, 100
"""Of what ``--hours`` plans."""
AT_ONCE = 32
"""Sequences that are computed together; more than these make an update in several steps (``--update-freq``)."""
STARTS = 2
"""What beginning and ending the processes of a stage takes, as a multiple of one process's start."""
BYTES_PER_PARAMETER = 24
"""In fp32: weight, gradient, two moments, average, and a copy on its way to a file."""
OVERHEAD = 1.15
"""Of fairseq's trainer around an update, and of saving, in what is measured."""
_WARM, _TIMED, _LEAST_SECONDS = 2, 3, 1.0


class Speed(NamedTuple):
    """What was measured.

    Attributes:
        costs: seconds that a token's training takes, with each of some models.
        start: seconds until a process that trains has started.
        taken: seconds that measuring took.
    """

    costs: Sequence[float]
    start: float = 5.0
    taken: float = 0.0


Measure = Callable[[Sequence["Shape"], int], Speed]
"""Shapes, and tokens of an update -> how fast they are trained."""


class Shape(NamedTuple):
    """Sizes of a Switch language model; heads are 32 wide, inner layers four times the width."""

    width: int
    layers: int
    vocab_size: int
    num_experts: int = NUM_EXPERTS

    def counted(self, num_experts: int) -> SwitchLMShape:
        """Return what counts its parameters and operations, with so many experts."""
        switched = self.layers // MOE_FREQ
        sizes = (self.width, 4 * self.width, self.layers, self.vocab_size, LENGTH)
        return SwitchLMShape(*sizes, (num_experts,) * switched, (num_experts,) * switched, LENGTH + 2)

    @property
    def num_params(self) -> int:
        """Parameters."""
        return self.counted(self.num_experts).num_params

    @property
    def num_active(self) -> int:
        """Parameters that a token uses."""
        return self.counted(1).num_params

    @property
    def flops(self) -> int:
        """Operations of a token's training."""
        return self.counted(self.num_experts).train_flops_per_token


def shapes(vocab_size: int, num_experts: int = NUM_EXPERTS) -> list[Shape]:
    """Return the models to choose from, small ones first: the wider, the deeper."""
    return [Shape(width, max(2, round(width / 128) * 2), vocab_size, num_experts) for width in WIDTHS]


def expected_loss(shape: Shape, num_tokens: float, passes: float) -> float:
    """Return the loss to expect, in nats per token; only differences between shapes count.

    The form of Hoffmann et al. 2022, equation 10, for text that is read once; a further pass is worth less than the one
    before, as in Muennighoff et al. 2023, equation 5. The constants: ``docs/reference/defaults.md``.

    Args:
        shape: of the model.
        num_tokens: that it reads in all.
        passes: through the text.
    """
    once = num_tokens / max(1.0, passes)
    worth = once * (1 + 15 * (1 - math.exp(-(max(1.0, passes) - 1) / 15)))
    return 26 / shape.num_active**0.34 + 73 / worth**0.34


@dataclass(frozen=True)
class Wish:
    """What the user said before ``--``.

    Attributes:
        size: parameters; None: auto.
        passes: through the text; None: not said.
        hours: that all of it may take; None: any.
        is_paper: the paper's way (``--preset paper``).
    """

    size: Optional[int] = None
    passes: Optional[float] = None
    hours: Optional[float] = None
    is_paper: bool = False

    def record(self) -> dict[str, Any]:
        """Return it for run.json."""
        preset = "paper" if self.is_paper else None
        return {"size": self.size or "auto", "passes": self.passes, "hours": self.hours, "preset": preset}


@dataclass(frozen=True)
class Plan:
    """What was decided.

    Attributes:
        shape: of the model.
        passes: through the text.
        tokens: of each stage.
        why: how the size came about.
        forecast: seconds that all of it takes; None: not asked for.
    """

    shape: Shape
    passes: float
    tokens: Sequence[int]
    why: str
    forecast: Optional[float] = None

    @property
    def num_tokens(self) -> float:
        """Tokens of the whole training."""
        return self.passes * sum(self.tokens)


def num_updates(passes: float, tokens: int, tokens_per_update: int) -> int:
    """Return the updates of a stage."""
    return max(1, round(passes * tokens / tokens_per_update))


def tokens_of(stream: Stream, stage: Stage) -> int:
    """Return the tokens that a stage trains on once."""
    return sum(stream.megabatch(t).num_tokens for t in stage.megabatches)


def batch_of(num_tokens: float) -> int:
    """Return the sequences of an update: 8 for a million tokens in all, otherwise by their root, at least 4."""
    return int(8 * 2 ** max(-1, round(math.log2(max(1.0, num_tokens) / 1e6) / 2)))


def decide(stream: Stream, planned: Sequence[Stage], wish: Wish, experts: int, measure: Measure) -> Plan:
    """Choose size and passes.

    Args:
        stream: what is learned from.
        planned: the stages.
        wish: of the user.
        experts: of each Switch layer.
        measure: how fast shapes are trained here; called for ``--hours`` alone.

    Raises:
        ValueError: it cannot be; the message begins with the option.
    """
    assert stream.tokenizer is not None
    tokens = [tokens_of(stream, stage) for stage in planned]
    possible = shapes(stream.tokenizer.vocab_size + NUM_FAIRSEQ_SYMBOLS, experts)
    if wish.hours is not None:
        return by_time(possible, tokens, stream, wish, measure)
    passes = 1.0 if wish.passes is None else wish.passes
    if wish.size is None:
        wanted = passes * sum(tokens) / TOKENS_PER_PARAMETER
        fitting = [each for each in possible if bytes_needed(each, AT_ONCE * LENGTH) <= memory()] or possible[:1]
        shape = _nearest(fitting, wanted, lambda each: each.num_active)
        why = f"one for every {passes * sum(tokens) / shape.num_active:.0f} tokens read"
    else:
        shape, why = _sized(possible, wish.size), f"--size {wish.size:,}"
    return Plan(shape, passes, tokens, why)


def _sized(possible: Sequence[Shape], size: int) -> Shape:
    least, most = possible[0].num_params, possible[-1].num_params
    if not 0.5 * least <= size <= 2 * most:
        raise ValueError(f"--size {size:,}: from {least:,} to {most:,} parameters are possible with this vocabulary")
    return _nearest(possible, size, lambda each: each.num_params)


def _nearest(possible: Sequence[Shape], wanted: float, count: Callable[[Shape], int]) -> Shape:
    return min(possible, key=lambda each: abs(math.log(count(each) / max(1.0, wanted))))


def by_time(possible: Sequence[Shape], tokens: Sequence[int], stream: Stream, wish: Wish, measure: Measure) -> Plan:
    """Choose the size, or the passes, or both, that make the best of some hours."""
    assert wish.hours is not None
    if wish.size is not None and wish.passes is not None:
        raise ValueError("--hours decides what of --size and --passes is not given; leave one of them out")
    total = sum(tokens)
    tested = len(tokens) / 3 * sum(stream.split(name).num_tokens for name in ("valid", "test"))
    at_hand = [_sized(possible, wish.size)] if wish.size is not None else possible
    guess = batch_of(wish.passes * total if wish.passes is not None else total)
    probes = at_hand if len(at_hand) == 1 else [at_hand[0], at_hand[2], at_hand[4]]
    speed = measure(probes, guess * LENGTH)
    costs = _costs(at_hand, probes, speed.costs)
    beside = speed.taken + STARTS * speed.start * len(tokens)
    found: list[Plan] = []
    for shape, cost in zip(at_hand, costs, strict=True):
        can_read = (wish.hours * 3600 - beside) / cost - tested
        passes = min(can_read / total, MOST_PASSES) if wish.passes is None else wish.passes
        if passes * total > can_read * 1.001 or can_read < LEAST_UPDATES * guess * LENGTH:
            continue
        forecast = (passes * total + tested) * cost + beside
        why = f"the best of {wish.hours:g} hours by the speed measured here, {1 / cost:,.0f} tokens per second"
        found.append(Plan(shape, passes, tokens, why, forecast))
    if not found:
        trained = max(LEAST_UPDATES * guess * LENGTH, (wish.passes or 0) * total)
        hours = (costs[0] * (tested + trained) + beside) / 3600
        what = "that size" if len(at_hand) == 1 else "the smallest model"
        advice = "give more"
        if tested > trained:
            advice += f", or a stream with less to test on (--test-bytes 5%): most of it is {len(tokens)} tests"
        raise ValueError(f"--hours {wish.hours:g}: too short for {what}, which takes {hours:.2g} here; {advice}")
    return min(found, key=lambda each: expected_loss(each.shape, each.num_tokens, each.passes))


def _costs(at_hand: Sequence[Shape], probes: Sequence[Shape], seconds: Sequence[float]) -> list[float]:
    """Return seconds per token of all shapes: a few were measured, the rest is interpolated by operations."""
    if len(at_hand) == 1:
        return [*seconds]
    points = [(shape.flops, cost) for shape, cost in zip(probes, seconds, strict=True)]
    return [_interpolated(points, shape.flops) for shape in at_hand]


def _interpolated(points: Sequence[tuple[float, float]], flops: float) -> float:
    """Return the cost on the line through the nearest two points; never less than that of the first."""
    pairs = list(itertools.pairwise(points))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if flops <= pair[1][0]), pairs[-1])
    return max(points[0][1], y0 + (flops - x0) * max(y1 - y0, 0.1 * y0) / (x1 - x0))


def bytes_needed(shape: Shape, tokens: int) -> int:
    """Estimate the memory of training.

    Args:
        shape: of the model.
        tokens: that are computed together.
    """
    return BYTES_PER_PARAMETER * shape.num_params + 4 * tokens * (
        40 * shape.width * shape.layers + 3 * shape.vocab_size
    )


def require_memory(shape: Shape, at_once: int, size: int) -> None:
    """Refuse a size that the memory of this machine cannot hold in training.

    Args:
        shape: of the model.
        at_once: tokens that are computed together.
        size: that was asked for.
    """
    needed, there = bytes_needed(shape, at_once), memory()
    if needed > there:
        raise ValueError(
            f"--size {size:,}: training takes about {needed / 2**30:,.1f} GiB of memory, this machine has "
            f"{there / 2**30:,.1f}; give a smaller --size"
        )


def memory() -> int:
    """Return the bytes of memory that this process may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    words = limit.read_text().strip() if limit.is_file() else ""
    return min(total, int(words)) if words.isdecimal() else total


def measure_speed(shapes: Sequence[Sequence[int]], tokens_per_update: int, length: int, on_cpu: bool) -> Speed:
    """Return how fast models are trained here.

    A process of its own measures: it needs torch, which alma-stream itself does without until it trains.

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
    words = [sys.executable, "-c", "from fairseq_alma.text import model_size; model_size.answer()"]
    done = subprocess.run(words, input=job, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise AlmaError(f"--hours: the speed of this machine could not be measured ({reason:.200}); give --size")
    found = json.loads(done.stdout.splitlines()[-1])
    taken = time.perf_counter() - started
    return Speed(found["costs"], taken - found["measuring"], taken)


def answer() -> None:
    """Measure what standard input names, in the process that `measure_speed` starts."""
    from fairseq_alma.text import model  # noqa: F401 - a start has these imports

    job, started = json.load(sys.stdin), time.perf_counter()
    costs = [seconds_per_token(shape, job) for shape in job["shapes"]]
    print(json.dumps({"costs": costs, "measuring": time.perf_counter() - started}))


def seconds_per_token(shape: Sequence[int], job: dict, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return what a token's training takes; see `measure_speed`."""
    import torch

    from fairseq_alma.text.model import build_from_config
    from fairseq_alma.training.average import WeightAverage

    width, layers, vocab_size, num_experts = shape
    device = "cuda" if torch.cuda.is_available() and not job["on_cpu"] else "cpu"
    config = {
        "decoder_embed_dim": width, "decoder_ffn_embed_dim": 4 * width, "decoder_layers": layers,
        "decoder_attention_heads": max(1, width // 32), "num_experts": num_experts, "gate_trees": "", "dropout": 0.0,
        "tokens_per_sample": job["length"], "max_target_positions": None,
    }  # fmt: skip
    model = build_from_config(config, vocab_size, device).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    average = WeightAverage("1/16")
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
