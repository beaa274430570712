"""Load a language model or an ensemble with its tokenizer, for notebooks and lm_eval.

As in training, ``</s>`` precedes the first token of a document, and ``</s>`` follows the last token. A long
document is split into windows. The inputs of each later window begin with the last target of the previous window.

Letters: B sequences, T positions, V vocabulary size.
"""

import math
import threading
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
from torch.nn.utils.rnn import pad_sequence

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.data.tokens import EOS, NUM_FAIRSEQ_SYMBOLS, StreamTokenizer
from fairseq_alma.errors import AlmaError
from fairseq_alma.runs.lookup import stream_of
from fairseq_alma.text.losses import CHUNK_ELEMENTS
from fairseq_alma.training.stage_task import refuse_other_weights

PAD = 1
IGNORED = -100
_SAMPLING = threading.Lock()  # fairseq samples with the global random generator of torch, which all threads share


@dataclass(frozen=True)
class Score:
    """Losses of a document.

    Attributes:
        num_tokens: number of tokens of the text, without the EOS token.
        num_bytes: number of UTF-8 bytes of the text.
        bits: total loss of the tokens of the text, in bits.
        end_bits: loss of the EOS token, in bits.
    """

    num_tokens: int
    num_bytes: int
    bits: float
    end_bits: float

    @property
    def bits_per_byte(self) -> float:
        """Return the loss per byte in bits, without the EOS token; NaN for an empty text."""
        return self.bits / self.num_bytes if self.num_bytes else math.nan

    @property
    def bits_per_token(self) -> float:
        """Return the loss per token in bits, including the EOS token."""
        return (self.bits + self.end_bits) / (self.num_tokens + 1)


@dataclass(frozen=True)
class LoadedModel:
    """A language model and its tokenizer.

    Attributes:
        model: fairseq model on the CPU, in evaluation mode.
        dictionary: dictionary of the stream.
        tokenizer: tokenizer of the stream; id u of the tokenizer is id u + 4 of the model.
    """

    model: Any
    dictionary: Dictionary
    tokenizer: StreamTokenizer

    @property
    def longest(self) -> int:
        """Return the maximum sequence length in tokens."""
        return int(self.model.max_positions())

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        return [token + NUM_FAIRSEQ_SYMBOLS for token in self.tokenizer.encode_batch([text])[0]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; skip fairseq's four special symbols."""
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
        """Generate text, and return the prompt followed by the generated text.

        Args:
            prompt: text to continue.
            max_new_tokens: maximum number of new tokens; the maximum sequence length is a further limit.
            seed: random seed of sampling; None: greedy decoding.
            temperature: sampling temperature.
            top_k: sample from the k most probable tokens; -1: sample from all tokens.
            top_p: sample from the most probable tokens with total probability ``top_p``; -1: sample from all tokens.

        Raises:
            AlmaError: an argument is out of range, both ``top_k`` and ``top_p`` are given, or the prompt leaves no
                position for a new token within the maximum sequence length.
        """
        most = len(self.dictionary)
        rules = {
            f"temperature {temperature}: expected a number above 0": temperature > 0,
            f"top_k {top_k}: expected 1 to {most}, or -1 for all tokens": top_k == -1 or 1 <= top_k <= most,
            f"top_p {top_p}: expected a number above 0 up to 1, or -1 for all tokens": top_p == -1 or 0 < top_p <= 1,
            f"top_k {top_k}, top_p {top_p}: expected at most one of both; remove one": -1 in (top_k, top_p),
            "temperature, top_k and top_p need sampling; give a seed": seed is not None
            or (temperature, top_k, top_p) == (1, -1, -1),
        }
        if broken := [rule for rule, holds in rules.items() if not holds]:
            raise AlmaError(broken[0])
        ids = [EOS, *self.encode(prompt)]
        if seed is None:
            return prompt + self.continue_ids(ids, max_new_tokens)
        with _SAMPLING, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            sampling = _Sampling(self.dictionary, top_k, top_p)
            return prompt + self.continue_ids(ids, max_new_tokens, temperature, sampling)

    def continue_ids(self, ids: list[int], max_new_tokens: int, temperature: float = 1.0, strategy: Any = None) -> str:
        """Generate text after the T >= 1 ids of a prompt (if empty, ``[EOS]``), and return only the generated text.

        ``strategy``: search strategy of fairseq's `SequenceGenerator`; None: greedy decoding.

        Raises:
            AlmaError: ``max_new_tokens`` is not positive, or T is not less than the maximum sequence length.
        """
        if max_new_tokens < 1:
            raise AlmaError(f"max_new_tokens {max_new_tokens}: expected a positive integer")
        prompt = torch.tensor([ids])
        length = min(len(ids) + max_new_tokens, self.longest) - 1
        if len(ids) > length:
            raise AlmaError(
                f"prompt: {len(ids)} tokens, but the model supports at most {self.longest} tokens including the "
                "generated text; give a shorter prompt"
            )
        generator = SequenceGenerator(
            [self.model], self.dictionary, beam_size=1, max_len_a=0, max_len_b=length, max_len=self.longest,
            temperature=temperature, search_strategy=strategy,
        )  # fmt: skip
        sample = {"net_input": {"src_tokens": prompt, "src_lengths": torch.tensor([len(ids)])}}
        found = generator.generate([self.model], sample, prefix_tokens=prompt[:, 1:], bos_token=ids[0])
        # Some tokenizers remove the space before the first token of a text, so the new tokens are not decoded alone.
        return self.decode([ids[0], *found[0][0]["tokens"].tolist()])[len(self.decode(ids)) :]

    def score(self, texts: Union[str, Sequence[str]]) -> list[Score]:
        """Return a list with the `Score` of each document; ``texts`` is one document (a ``str``) or several."""
        documents = [texts] if isinstance(texts, str) else list(texts)
        all_ids = [self.encode(text) for text in documents]
        losses = self.losses([window for ids in all_ids for window in cut([EOS, *ids, EOS], self.longest)])
        bits = (torch.cat(losses).double() if losses else torch.empty(0)) / math.log(2)
        return [
            Score(len(ids), len(text.encode()), found[:-1].sum().item(), found[-1].item())
            for text, ids, found in zip(documents, all_ids, bits.split([len(ids) + 1 for ids in all_ids]), strict=True)
        ]

    def losses(self, windows: Sequence[tuple[list[int], list[int]]]) -> list[Tensor]:
        """Return the losses of the target tokens of each window, in nats; skip targets with id -100.

        Args:
            windows: (input ids, target ids) of equal length; see `cut`.
        """
        found: list[Tensor] = [torch.empty(0)] * len(windows)
        order = sorted(range(len(windows)), key=lambda index: -len(windows[index][1]))
        while order:
            num_rows = max(1, CHUNK_ELEMENTS // (len(windows[order[0]][1]) * len(self.dictionary)))
            rows, order = order[:num_rows], order[num_rows:]
            inputs, targets = (
                pad_sequence([torch.tensor(windows[index][side]) for index in rows], True, padding)
                for side, padding in enumerate((PAD, IGNORED))
            )
            losses = F.nll_loss(self.log_probs(inputs).transpose(1, 2), targets, reduction="none", ignore_index=IGNORED)
            for index, loss, target in zip(rows, losses, targets, strict=True):
                found[index] = loss[target != IGNORED]
        return found

    @torch.no_grad()
    def log_probs(self, tokens: Tensor) -> Tensor:
        """Return the (B, T, V) log-probabilities of each next token; ``tokens`` (B, T) are padded on the right."""
        return self.model.get_normalized_probs(self.model(tokens), log_probs=True)


class _Sampling(search.Sampling):
    """Sampling after renormalization: fairseq masks all tokens but that of the prompt, whose probability may be 0."""

    def step(self, step: int, lprobs: Tensor, *others: Any) -> Any:
        return super().step(step, lprobs.log_softmax(dim=-1), *others)


def load_model(path: Union[str, Path], stream: Union[str, Path, None] = None) -> LoadedModel:
    """Load a language model or an ensemble from a checkpoint, on the CPU.

    Args:
        path: checkpoint file.
        stream: stream with the tokenizer of the model; None: the stream on which the model was trained.

    Raises:
        AlmaError: the file is not a checkpoint, or the dictionaries of stream and model differ.
    """
    path = Path(path)
    if path.is_dir():
        raise AlmaError(
            f"{path}: expected a checkpoint, found a folder; give a checkpoint or a run, or load an exported folder "
            "with transformers (AutoModelForCausalLM.from_pretrained)"
        )
    checkpoint = read_checkpoint(path)
    config = OmegaConf.create(checkpoint["cfg"]["model"])
    opened = stream_of(checkpoint, path, None if stream is None else Path(stream))
    dictionary = Dictionary.load(str(opened.root / "dict.txt"))
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary, checkpoint_path=str(path))
    model = models.build_model(config, task, from_checkpoint=True)
    refuse_other_weights(model, str(path))
    model.load_state_dict(checkpoint["model"], strict=True, model_cfg=config)
    model = model.float().eval().requires_grad_(False)
    return LoadedModel(model, dictionary, StreamTokenizer.open(opened.root))


def cut(sequence: Sequence[int], window: int) -> Iterator[tuple[list[int], list[int]]]:
    """Split a document into windows of at most ``window`` target tokens; yield (inputs, targets) of each window.

    The first id of the document is only an input.
    Example for ``</s>`` 5 6 7 ``</s>`` and window 2: inputs are ``</s>`` 5 and 6 7, targets are 5 6 and 7 ``</s>``.
    """
    for start in range(0, len(sequence) - 1, window):
        end = min(start + window, len(sequence) - 1)
        yield list(sequence[start:end]), list(sequence[start + 1 : end + 1])
