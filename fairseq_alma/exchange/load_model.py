"""A checkpoint, of one model or an ensemble, or an exported folder, as a model in memory with its tokenizer.

It is that of `modeling_alma`: nothing of a folder's code is run, and fairseq is not needed. transformers is.

It writes text, and it scores documents, for the choice of data and for the search for what it has seen before. A
document begins behind ``</s>`` and ends with one; each window after the first begins with the last token of the one
before, or with more context if that is asked for. Joined, documents are one sequence, as fairseq-eval-lm has a split.
"""

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.data.tokens import EOS, NUM_FAIRSEQ_SYMBOLS, StreamTokenizer
from fairseq_alma.errors import AlmaError
from fairseq_alma.exchange.exported_folder import (
    TOKENIZER,
    FolderConfig,
    misfit,
    read_config,
    read_weights,
)
from fairseq_alma.exchange.member_weights import groups_of
from fairseq_alma.exchange.model_folder import config_of, tensors_of, tokenizer_of
from fairseq_alma.runs.lookup import stream_of


class Tokens:
    """Text to the ids of a model and back.

    Args:
        tokenizer: the stream's; its token u has id u + 4.
    """

    def __init__(self, tokenizer: StreamTokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without any special token."""
        return [[token + NUM_FAIRSEQ_SYMBOLS for token in each] for each in self.tokenizer.encode_batch(texts)]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; fairseq's four symbols are left out."""
        symbols = self.tokenizer.symbols
        return self.tokenizer.decode(symbols[each - NUM_FAIRSEQ_SYMBOLS] for each in ids if each >= NUM_FAIRSEQ_SYMBOLS)


class FolderTokens:
    """The same for an exported folder.

    Args:
        path: its ``tokenizer.json``.
        config: of its model.

    Raises:
        AlmaError: it is no tokenizer, or not that of the model.
    """

    def __init__(self, path: Path, config: FolderConfig) -> None:
        from tokenizers import Tokenizer

        remedy = "give a folder that alma-export wrote"
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception for any damaged file
            raise AlmaError(f"{path}: not a tokenizer ({error}); {remedy}") from error
        padding = self.tokenizer.padding or {}
        if max(padding.get("length") or 0, padding.get("pad_to_multiple_of") or 0) > config.max_position_embeddings:
            raise AlmaError(f"{path}: fills sequences up to more tokens than the model takes; {remedy}")
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.tokenizer.encode_special_tokens = True
        size = max(self.tokenizer.get_vocab().values(), default=-1) + 1
        special = sorted(token for token in self.tokenizer.get_added_tokens_decoder() if token < NUM_FAIRSEQ_SYMBOLS)
        if size != config.vocab_size or special != list(range(NUM_FAIRSEQ_SYMBOLS)):
            raise AlmaError(
                f"{path}: a vocabulary of {size:,} tokens, {len(special)} of fairseq's four among them; config.json "
                f"says {config.vocab_size:,}; {remedy}"
            )

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without any special token."""
        return [each.ids for each in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; special tokens are left out."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


@dataclass
class LoadedModel:
    """A model that predicts, and its tokenizer.

    Attributes:
        model: `modeling_alma.AlmaForCausalLM`, without dropout.
        tokens: text to ids and back.
        first: id that every sequence begins with: that of ``</s>``, or of ``<s>``.
        longest: tokens that a sequence may have.
    """

    model: Any
    tokens: Union[Tokens, FolderTokens]
    first: int = EOS
    longest: int = 0

    def generate(self, prompt: str = "", max_new_tokens: int = 50, seed: Optional[int] = None, **options: Any) -> str:
        """Return a prompt and the text that follows it.

        Args:
            prompt: text.
            max_new_tokens: tokens to write at most; no more than the model takes with the prompt.
            seed: of sampling; None: the most probable token each time.
            options: of transformers' ``generate``: ``temperature``, ``top_p``, ``num_beams``, ….
        """
        ids = torch.tensor([[self.first, *self.tokens.encode([prompt])[0]]])
        room = self.longest - ids.size(1)
        if room < 1:
            raise AlmaError(f"the prompt has {ids.size(1)} tokens, the model takes {self.longest}; give a shorter one")
        if seed is not None:
            torch.manual_seed(seed)
        found = self.model.generate(
            ids, do_sample=seed is not None, max_new_tokens=min(max_new_tokens, room), **options
        )
        return self.tokens.decode(found[0].tolist())


@contextlib.contextmanager
def _refusing_misfits(path: Path) -> Iterator[None]:
    """Raise AlmaError for the errors of a configuration that makes no model of the weights beside it."""
    try:
        yield
    except (RuntimeError, LookupError, TypeError, ValueError, ArithmeticError, AssertionError) as error:
        raise misfit(path, str(error).strip().partition("\n")[0]) from error


@torch.no_grad()
def _try(model: Any, config: Mapping[str, Any]) -> None:
    """Raise one of several errors if a folder's configuration makes no model that predicts a token."""
    logits = model(torch.tensor([[config["bos_token_id"]]])).logits
    if not logits.isfinite().any():
        raise ValueError("the model predicts nothing")


def load_model(path: Union[str, Path], stream: Union[str, Path, None] = None) -> LoadedModel:
    """Load a checkpoint or an exported folder on the CPU.

    Args:
        path: a checkpoint of a language model or an ensemble, or a folder that ``alma-export`` wrote.
        stream: whose tokenizer a checkpoint's model knows; None: the one that it was trained on. A folder has its own.

    Raises:
        AlmaError: it is neither, a stream is given for a folder, or transformers is not installed.
    """
    path = Path(path)
    try:
        import transformers  # noqa: F401

        from fairseq_alma.exchange.modeling_alma import AlmaConfig, AlmaForCausalLM
    except ImportError as error:
        raise AlmaError(
            "transformers is not installed, and this needs it; pip install 'fairseq-alma[export]'"
        ) from error
    tokens: Union[Tokens, FolderTokens]
    if path.is_dir():
        if stream is not None:
            raise AlmaError(f"--stream {stream}: {path} has a tokenizer of its own; leave --stream out")
        folder_config = read_config(path)
        weights = read_weights(path, folder_config)
        tokens = FolderTokens(path / TOKENIZER, folder_config)
        config = folder_config.options()
    else:
        checkpoint = read_checkpoint(path)
        groups = list(groups_of(checkpoint["cfg"]["model"], checkpoint["model"], path))
        tokens = Tokens(
            tokenizer_of(stream_of(checkpoint, path, None if stream is None else Path(stream)), groups, path)
        )
        config = config_of(checkpoint, groups)
        weights = dict(tensors_of(groups, path))
    with _refusing_misfits(path):
        with torch.device("meta"):
            model = AlmaForCausalLM(AlmaConfig(**config))
        # Assigned tensors stay where they are, in a checkpoint's mapped memory for one.
        nn.Module.load_state_dict(model, weights, strict=True, assign=True)
    model = model.float().eval()
    if path.is_dir():
        with _refusing_misfits(path):
            _try(model, config)
    model.generation_config.suppress_tokens = [0, 1, 3]
    model.requires_grad_(False)
    return LoadedModel(model, tokens, config["bos_token_id"], config["max_position_embeddings"])


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
