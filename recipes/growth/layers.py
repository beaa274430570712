"""What a language model uses of its layers and of the text before: the residual stream behind each layer, the loss
without it, and the loss with the last tokens alone.

    python recipes/growth/layers.py RUN/stage-003/member-0/checkpoint_average.pt TEXT

TEXT: a file, a document a line, that the model was not trained on. A layer norm divides the stream by its size, so
that a layer that adds little to a large stream is hardly seen by what reads it. A hidden unit behind a ReLU that fires
for no token gets no gradient and stays as it is. A model that predicts with two tokens as well as with 32 is a table of
pairs, whatever it is made of.
"""

import argparse
import math
import sys
from itertools import islice
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_alma.cli.entry import command
from fairseq_alma.errors import AlmaError
from fairseq_alma.exchange.load_model import LoadedModel, load_model, score_texts
from fairseq_alma.report.spelling import render_markdown

CONTEXTS = (1, 2, 4, 8, 16, 32)
"""Tokens before the one that is predicted."""
PLACES = 4096
"""At most so many tokens are predicted for each."""


def bits_per_token(loaded: LoadedModel, texts: Sequence[str]) -> float:
    """Return the loss of documents, each on its own and with its end."""
    scores = list(score_texts(loaded, texts))
    return sum(each.bits + each.end_bits for each in scores) / sum(each.num_tokens + 1 for each in scores)


def with_hooks(hooks: Mapping[nn.Module, Callable[..., Any]], loaded: LoadedModel, texts: Sequence[str]) -> float:
    """Return the loss of documents while hooks watch layers, or change what they return."""
    handles = [layer.register_forward_hook(hook) for layer, hook in hooks.items()]
    try:
        return bits_per_token(loaded, texts)
    finally:
        for handle in handles:
            handle.remove()


def without(_: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Optional[Tensor], ...]) -> tuple[Any, ...]:
    """Let a layer hand on what it was given."""
    return (inputs[0], *outputs[1:])


def table(loaded: LoadedModel, texts: Sequence[str]) -> str:
    """Lay out, layer by layer, what it is given and hands on, and what is lost without it."""
    layers = loaded.model.members[0].layers
    dense = {number: layer.fc2 for number, layer in enumerate(layers) if layer.switch is None}
    sizes: dict[nn.Module, list[tuple[float, float]]] = {layer: [] for layer in layers}
    used: dict[nn.Module, Tensor] = {}

    def measure(layer: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        sizes[layer].append((inputs[0].std(-1).mean().item(), outputs[0].std(-1).mean().item()))

    def note_use(fc2: nn.Module, hidden: tuple[Tensor], _: Tensor) -> None:
        fires = (hidden[0] > 0).flatten(0, -2).any(0)
        used[fc2] = fires | used.get(fc2, fires)

    whole = with_hooks({**dict.fromkeys(layers, measure), **dict.fromkeys(dense.values(), note_use)}, loaded, texts)
    rows = []
    for number, layer in enumerate(layers):
        lost = with_hooks({layer: without}, loaded, texts) - whole
        before, behind = torch.tensor(sizes[layer]).mean(0).tolist()
        fires = used[dense[number]] if number in dense else None
        dead = "–" if fires is None else f"{int((~fires).sum())} of {len(fires)}"
        rows.append([str(number), f"{before:.1f}", f"{behind:.1f}", f"{lost:+.3f}", dead])
    header = ["layer", "stream before it", "behind it", "bits per token without it", "hidden units that never fire"]
    return render_markdown(header, rows)


def context_table(loaded: LoadedModel, texts: Sequence[str]) -> str:
    """Lay out the loss of the same tokens by how many of those before are seen, as far as the model takes so many.

    Raises AlmaError if no document is long enough for that.
    """
    lengths = [length for length in CONTEXTS if length <= loaded.longest]
    longest = lengths[-1]
    documents = [torch.tensor([loaded.first, *ids]) for ids in loaded.tokens.encode(list(texts)) if len(ids) >= longest]
    if not documents:
        raise AlmaError(f"no document of {longest} tokens or more; give longer ones")
    targets = torch.cat([ids[longest:] for ids in documents])[:PLACES]
    rows = []
    for length in lengths:
        seen = torch.cat([ids[longest - length : -1].unfold(0, length, 1) for ids in documents])[:PLACES]
        with torch.no_grad():
            logits = torch.cat([loaded.model(each).logits[:, -1] for each in seen.split(64)])
        rows.append([str(length), f"{F.cross_entropy(logits, targets).item() / math.log(2):.3f}"])
    return render_markdown(["tokens of context", "bits per token"], rows)


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("checkpoint", type=Path, help="of a single language model")
    options.add_argument("text", type=Path, help="documents, one a line, that it was not trained on")
    options.add_argument("--documents", type=int, default=500, help="at most so many of them (default: 500)")
    args = options.parse_args(argv)
    try:
        with args.text.open() as file:
            texts = [line.strip() for line in islice(file, args.documents) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise AlmaError(f"{args.text}: {error}; give a file of text") from error
    if not texts:
        raise AlmaError(f"{args.text}: no text in its first {args.documents} lines")
    loaded = load_model(args.checkpoint)
    if (num_members := len(loaded.model.members)) > 1:
        raise AlmaError(f"{args.checkpoint}: an ensemble of {num_members} models; give the checkpoint of one of them")
    print(table(loaded, texts))
    print(context_table(loaded, texts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
