"""Losses of documents under a model, for the choice of data and for the search for what it has seen before.

A document begins behind ``</s>`` and ends with one; each window after the first begins with the last token of the one
before, or with more context if that is asked for. Joined, documents are one sequence, as fairseq-eval-lm has a split.
"""

import math
from dataclasses import dataclass
from typing import Any, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_alma.data.token_file import EOS
from fairseq_alma.exchange.load_model import LoadedModel

IGNORED = -100
_AT_ONCE = 256  # documents whose windows are sorted by length


@dataclass(frozen=True)
class Score:
    """What a document costs.

    Attributes:
        num_tokens: of the text, without the end of the document.
        num_bytes: of the text in UTF-8.
        bits: sum of the losses of these tokens.
        end_bits: loss of the document's end.
    """

    num_tokens: int
    num_bytes: int
    bits: float
    end_bits: float

    def as_record(self) -> dict[str, Any]:
        """Return it with the figures per token and per byte; a text without bytes has None there."""
        return {
            "num_tokens": self.num_tokens,
            "num_bytes": self.num_bytes,
            "bits": round(self.bits, 6),
            "end_bits": round(self.end_bits, 6),
            "bits_per_token": round((self.bits + self.end_bits) / (self.num_tokens + 1), 6),
            "bits_per_byte": round(self.bits / self.num_bytes, 6) if self.num_bytes else None,
        }


def score_texts(
    loaded: LoadedModel,
    texts: Iterable[str],
    window: int = 0,
    context: int = 0,
    batch_size: int = 16,
    joined: bool = False,
) -> Iterator[Score]:
    """Yield the score of each text, in order.

    Args:
        loaded: the model.
        texts: documents.
        window: tokens of a window, context included; 0: as many as the model takes.
        context: tokens before each window that give context and do not count: a sliding window.
        batch_size: windows at a time.
        joined: cut windows out of all documents one behind the other, ``</s>`` between them: what stands before a
            document in its window is context. All texts are kept in memory.

    Raises:
        ValueError: the window is longer than the model takes, or no longer than its context.
    """
    window = window or loaded.longest
    if not 0 <= context < window <= loaded.longest:
        raise ValueError(f"a window of {window} with a context of {context}: the model takes {loaded.longest}")
    group: list[str] = []
    for text in texts:
        group.append(text)
        if len(group) == _AT_ONCE and not joined:
            yield from _score_group(loaded, group, window, context, batch_size, joined)
            group = []
    if group:
        yield from _score_group(loaded, group, window, context, batch_size, joined)


def cut(ids: Sequence[int], first: int, window: int, context: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield inputs and targets of each window of one document; targets that do not count are -100.

    For ids 5 6 7, a window of 2 and no context: inputs ``</s>`` 5 and 6 7, targets 5 6 and 7 ``</s>``.
    """
    sequence = [first, *ids, EOS]
    step = window - context
    for start in range(0, len(sequence) - 1, step):
        end = min(start + step, len(sequence) - 1)
        before = max(0, start - context)
        yield sequence[before:end], [IGNORED] * (start - before) + sequence[start + 1 : end + 1]


def _score_group(
    loaded: LoadedModel, texts: list[str], window: int, context: int, batch_size: int, joined: bool
) -> Iterator[Score]:
    all_ids = loaded.tokens.encode(texts)
    sequences = [[token for ids in all_ids for token in (*ids, EOS)][:-1]] if joined else all_ids
    pieces = [piece for ids in sequences for piece in cut(ids, loaded.first, window, context)]
    losses: list[Tensor] = [torch.empty(0)] * len(pieces)
    order = sorted(range(len(pieces)), key=lambda index: -len(pieces[index][1]))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        for index, row in zip(rows, _losses(loaded, [pieces[index] for index in rows]), strict=True):
            losses[index] = row
    bits = torch.cat(losses).double() / math.log(2)
    for text, ids, found in zip(texts, all_ids, bits.split([len(ids) + 1 for ids in all_ids]), strict=True):
        yield Score(len(ids), len(text.encode()), found[:-1].sum().item(), found[-1].item())


@torch.no_grad()
def _losses(loaded: LoadedModel, pieces: Sequence[tuple[list[int], list[int]]]) -> list[Tensor]:
    """Return the losses in nats of each window's targets that count."""
    longest = max(len(inputs) for inputs, _ in pieces)
    inputs = torch.tensor([[*each, *[loaded.model.config.pad_token_id] * (longest - len(each))] for each, _ in pieces])
    targets = torch.tensor([[*each, *[IGNORED] * (longest - len(each))] for _, each in pieces])
    logits = loaded.model(inputs, use_cache=False).logits
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none", ignore_index=IGNORED)
    return [row[target != IGNORED] for row, target in zip(losses.view_as(targets), targets, strict=True)]
