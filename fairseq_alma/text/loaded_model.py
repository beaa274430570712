"""A language model of any checkpoint here, also an ensemble, in memory with its tokenizer: for notebooks and lm_eval.

A document begins behind ``</s>`` and ends with one, as in training. Of a document that is longer than a window, each
window after the first begins with the last token of the one before, or with more context if that is asked for.

Letters: B sequences, T positions, V vocabulary size.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterator, Optional, Sequence, Union

import torch
import torch.nn.functional as F
from fairseq import models, search
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf
from torch import Tensor

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.data.tokens import EOS, NUM_FAIRSEQ_SYMBOLS, StreamTokenizer
from fairseq_alma.errors import AlmaError
from fairseq_alma.runs.lookup import stream_of
from fairseq_alma.training.loading import refuse_other_weights

BOS, PAD = 0, 1
IGNORED = -100
_AT_ONCE = 16  # windows


@dataclass(frozen=True)
class Score:
    """Losses of a document, in bits.

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

    @property
    def bits_per_byte(self) -> float:
        """Loss of the text per byte; NaN for an empty one."""
        return self.bits / self.num_bytes if self.num_bytes else math.nan

    @property
    def bits_per_token(self) -> float:
        """Loss per token, the end of the document included."""
        return (self.bits + self.end_bits) / (self.num_tokens + 1)


@dataclass(frozen=True)
class LoadedModel:
    """A model that predicts, and its tokenizer.

    Attributes:
        model: fairseq's, on the CPU, in evaluation mode.
        dictionary: of the stream.
        tokenizer: of the stream; its token u has id u + 4.
        first: id that every sequence begins with: that of ``</s>``, or of ``<s>``.
    """

    model: Any
    dictionary: Dictionary
    tokenizer: StreamTokenizer
    first: int = EOS

    @property
    def longest(self) -> int:
        """Tokens that a sequence may have."""
        return int(self.model.max_positions())

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, taken literally, without any special token."""
        return [token + NUM_FAIRSEQ_SYMBOLS for token in self.tokenizer.encode_batch([text])[0]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; fairseq's four symbols are omitted."""
        tokens = [each - NUM_FAIRSEQ_SYMBOLS for each in ids if each >= NUM_FAIRSEQ_SYMBOLS]
        return self.tokenizer.decode_batch([tokens])[0]

    def generate(
        self,
        prompt: str = "",
        max_new_tokens: int = 50,
        seed: Optional[int] = None,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = -1.0,
    ) -> str:
        """Return a prompt and the text that follows it.

        Args:
            prompt: text.
            max_new_tokens: tokens to write at most; no more than the model takes with the prompt.
            seed: of sampling; None: the most probable token each time.
            temperature: of sampling.
            top_k: sample from the k most probable tokens; -1: from all.
            top_p: sample from the most probable tokens whose probabilities add up to p; -1: from all.

        Raises:
            AlmaError: the prompt is longer than the model takes.
        """
        ids = torch.tensor([[self.first, *self.encode(prompt)]])
        length = min(ids.size(1) + max_new_tokens, self.longest) - 1
        if ids.size(1) > length:
            raise AlmaError(f"the prompt has {ids.size(1)} tokens, the model takes {self.longest}; give a shorter one")
        strategy = None if seed is None else search.Sampling(self.dictionary, top_k, top_p)
        generator = SequenceGenerator(
            [self.model], self.dictionary, beam_size=1, max_len_a=0, max_len_b=length, max_len=self.longest,
            temperature=temperature, search_strategy=strategy,
        )  # fmt: skip
        sample = {"net_input": {"src_tokens": ids, "src_lengths": torch.tensor([ids.size(1)])}}
        if seed is not None:
            torch.manual_seed(seed)
        found = generator.generate([self.model], sample, prefix_tokens=ids[:, 1:], bos_token=self.first)
        return self.decode(found[0][0]["tokens"].tolist())

    def score(self, texts: Union[str, Sequence[str]], window: int = 0, context: int = 0) -> list[Score]:
        """Return the losses of documents, in order.

        Args:
            texts: documents; a ``str`` is one document.
            window: tokens of a window, context included; 0: as many as the model takes.
            context: tokens before each window that give context and do not count: a sliding window.

        Raises:
            ValueError: the window is longer than the model takes, or no longer than its context.
        """
        documents = [texts] if isinstance(texts, str) else list(texts)
        window = window or self.longest
        if not 0 <= context < window <= self.longest:
            raise ValueError(f"a window of {window} with a context of {context}: the model takes {self.longest}")
        all_ids = [self.encode(text) for text in documents]
        losses = self.losses([piece for ids in all_ids for piece in cut([self.first, *ids, EOS], window, context)])
        bits = (torch.cat(losses).double() if losses else torch.empty(0)) / math.log(2)
        return [
            Score(len(ids), len(text.encode()), found[:-1].sum().item(), found[-1].item())
            for text, ids, found in zip(documents, all_ids, bits.split([len(ids) + 1 for ids in all_ids]), strict=True)
        ]

    def losses(self, pieces: Sequence[tuple[list[int], list[int]]]) -> list[Tensor]:
        """Return the losses in nats of each piece's targets; targets of -100 are skipped.

        Args:
            pieces: inputs and targets, as many of each.
        """
        found: list[Tensor] = [torch.empty(0)] * len(pieces)
        order = sorted(range(len(pieces)), key=lambda index: -len(pieces[index][1]))
        for start in range(0, len(order), _AT_ONCE):
            rows = order[start : start + _AT_ONCE]
            targets = _padded([pieces[index][1] for index in rows], IGNORED)
            log_probs = self.log_probs(_padded([pieces[index][0] for index in rows], PAD))
            losses = F.nll_loss(log_probs.transpose(1, 2), targets, reduction="none", ignore_index=IGNORED)
            for index, loss, target in zip(rows, losses, targets, strict=True):
                found[index] = loss[target != IGNORED]
        return found

    @torch.no_grad()
    def log_probs(self, tokens: Tensor) -> Tensor:
        """Return (B, T, V) log-probabilities of the tokens that follow (B, T) tokens, padded on the right."""
        return self.model.get_normalized_probs(self.model(tokens), log_probs=True)


def load_model(path: Union[str, Path], stream: Union[str, Path, None] = None) -> LoadedModel:
    """Load the checkpoint of a language model or an ensemble on the CPU.

    Args:
        path: the checkpoint.
        stream: whose tokenizer the model knows; None: the one that it was trained on.

    Raises:
        AlmaError: it is no checkpoint, or was trained on another stream.
    """
    path = Path(path)
    if path.is_dir():
        raise AlmaError(
            f"{path}: a folder, no checkpoint; give a run, or load an exported folder with transformers "
            "(AutoModelForCausalLM.from_pretrained)"
        )
    checkpoint = read_checkpoint(path)
    config, weights = checkpoint["cfg"]["model"], checkpoint["model"]
    opened = stream_of(checkpoint, path, None if stream is None else Path(stream))
    dictionary = Dictionary.load(str(opened.root / "dict.txt"))
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary, checkpoint_path=str(path))
    model = models.build_model(OmegaConf.create(config), task, from_checkpoint=True)
    refuse_other_weights(model, str(path))
    model.load_state_dict(weights, strict=True, model_cfg=OmegaConf.create(config))
    has_bos = (checkpoint["cfg"].get("task") or {}).get("add_bos_token")
    model = model.float().eval().requires_grad_(False)
    return LoadedModel(model, dictionary, StreamTokenizer.open(opened.root), BOS if has_bos else EOS)


def cut(sequence: Sequence[int], window: int, context: int = 0) -> Iterator[tuple[list[int], list[int]]]:
    """Yield inputs and targets of each window of one document; targets that do not count are -100.

    For ``</s>`` 5 6 7 ``</s>``, a window of 2 and no context: inputs ``</s>`` 5 and 6 7, targets 5 6 and 7 ``</s>``.

    Args:
        sequence: ids of the document, the first of which is only context.
        window: tokens of a window, context included.
        context: tokens before each window that do not count.
    """
    for start in range(0, len(sequence) - 1, window - context):
        end = min(start + window - context, len(sequence) - 1)
        before = max(0, start - context)
        yield list(sequence[before:end]), [IGNORED] * (start - before) + list(sequence[start + 1 : end + 1])


def _padded(rows: Sequence[Sequence[int]], filling: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filling] * (longest - len(row))] for row in rows])
