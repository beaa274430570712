"""The fairseq task ``alma_lm``: language modeling on one stage of a stream, with the tokenizer of the stream.

Training batches (`SequenceBatches`) are consecutive slices of a random order of the sequences, with a new order for
each epoch. With ``--new-first F``, the first epoch reads a fraction F of the new sequences, and then all sequences.

The order depends only on seed, stage and epoch, and the position within an epoch counts sequences. Therefore
``--batch-size 4 --update-freq 2`` reads the same sequences as ``--batch-size 8``. A run that resumes with another batch
size, or with another number of workers or processes, still reads each sequence once per epoch. fairseq instead
counts and shuffles batches. By default, fairseq drops the last batch if its length is not a multiple of 8.

Example for 10 sequences in the order o, batches of 2 sequences, and 2 processes: process 0 reads o[0:2], o[4:6] and
o[8:10]; process 1 reads o[2:4], o[6:8] and a padding batch. Without the padding batch, fairseq would omit the earlier
batches of process 1 in the same update from the loss and the token count, but not from the gradient.
"""

import argparse
import contextlib
import logging
import os
import sys
from dataclasses import dataclass, field
from typing import Any, Iterator, Optional, Sequence

import numpy as np
import torch
from fairseq.data import (
    AppendTokenDataset,
    ConcatDataset,
    FairseqDataset,
    IdDataset,
    ListDataset,
    NestedDictionaryDataset,
    NumelDataset,
    PadDataset,
    PrependTokenDataset,
    StripTokenDataset,
)
from fairseq.data.encoders import register_bpe
from fairseq.data.iterators import BufferedIterator, CountingIterator, EpochBatchIterating, ShardedIterator
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import utils as distributed_utils
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from omegaconf import II, DictConfig

from fairseq_alma.checkpoints.checkpoint_file import (
    DICTIONARY_KEY,
    Checkpoint,
    UnfitCheckpoint,
    check_config,
    check_dictionary,
    read_checkpoint,
)
from fairseq_alma.checkpoints.model_options import WEIGHTS_FLAG
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import StreamTokenizer, TokenFile
from fairseq_alma.errors import AlmaError, in_one_line, refuse_colon
from fairseq_alma.learners.learner import StageOptions, stage_ending_with
from fairseq_alma.options import flag
from fairseq_alma.text.train_options import BALANCING, OWNED
from fairseq_alma.text.transformer_lm import MAX_TOKENS
from fairseq_alma.training.feature import FEATURES
from fairseq_alma.training.features import NewFirst, refuse_inexact_precision
from fairseq_alma.training.stage_task import (
    CommandConfig,
    StageTask,
    check_options,
    fairseq_config,
    features_of,
    load_for_task,
    require_batch_size,
)

# Options of the task that determine the order of the sequences of an epoch, together with ``--megabatch``.
ORDER_OPTIONS = ("wait", "replay", "new_first", "tokens_per_sample", "seed")
# Version of the iterator state. The position counts sequences in version 3, and batches in fairseq's version 2.
POSITION_VERSION = 3


@dataclass
class AlmaBPEConfig(FairseqDataclass):
    """Option of ``--bpe alma``: folder of the stream, set by the task."""

    data: Optional[str] = II("task.data")


@register_bpe("alma", dataclass=AlmaBPEConfig)
class AlmaBPE:
    """Tokenizer of a stream, as a fairseq BPE encoder."""

    def __init__(self, cfg: AlmaBPEConfig) -> None:
        if cfg.data is None:
            raise AlmaError("--bpe alma: no stream given; give the folder of the stream with the tokenizer")
        self.tokenizer = StreamTokenizer.open(cfg.data)

    def encode(self, x: str) -> str:
        """Return the tokens of a text, separated by spaces."""
        return " ".join(self.tokenizer.encode(x))

    def decode(self, x: str) -> str:
        """Decode a string of tokens separated by spaces, and return the text."""
        return self.tokenizer.decode(x.split(" "))


class StageDataset(ConcatDataset):
    """Training sequences of a stage.

    Args:
        datasets: sequences of each mega-batch.
        first: (M,) indices of the sequences that are read one extra time, at the start of the first epoch.
    """

    def __init__(self, datasets: Sequence[FairseqDataset], first: np.ndarray) -> None:
        super().__init__(datasets)
        self.first = first

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return self.sizes[indices]


class SequenceBatches(EpochBatchIterating):
    """Iterator for fairseq's trainer over the training batches of one process.

    Args:
        dataset: dataset with the sequences.
        first: (M,) indices of the sequences that the first epoch reads before all sequences.
        limits: ``max_tokens`` and ``max_sentences`` of a batch; None: no limit.
        seed: integers that seed the random order, together with the epoch.
        shard: (rank of this process, number of processes).
        pad: index of the padding symbol.
        epoch: number of the first epoch; epochs are numbered from 1.
        num_workers: number of processes that load data.
        buffer_size: number of batches to load ahead.
        save_dir: checkpoint directory, for error messages.
    """

    def __init__(
        self,
        dataset: FairseqDataset,
        limits: dict[str, Optional[int]],
        seed: Sequence[int],
        first: np.ndarray,
        shard: tuple[int, int] = (0, 1),
        pad: int = 1,
        epoch: int = 1,
        num_workers: int = 0,
        buffer_size: int = 0,
        save_dir: str = "",
    ) -> None:
        self.dataset, self.limits, self.pad = dataset, limits, pad
        self.seed, self.first = tuple(seed), first
        self.shard_id, self.num_shards = shard
        self.epoch, self.position = max(epoch, 1), 0  # position: number of sequences read before `_batches`
        self.num_workers, self.buffer_size, self.save_dir = num_workers, min(buffer_size, 20), save_dir
        self._batches: Sequence[np.ndarray] = ()
        self._cur_epoch_itr: Optional[CountingIterator] = None

    def _cut(self, order: np.ndarray) -> Sequence[np.ndarray]:
        size = self.limits["max_sentences"]
        if self.limits["max_tokens"] is None and size is not None:
            return [order[first : first + size] for first in range(0, len(order), size)]
        return self.dataset.batch_by_size(order, **self.limits, required_batch_size_multiple=1)

    def __len__(self) -> int:
        return -(-len(self._cut(np.concatenate(self._parts))) // self.num_shards)

    @property
    def _parts(self) -> list[np.ndarray]:
        return [*([self.first] if self.epoch == 1 else []), np.arange(len(self.dataset))]

    @property
    def first_batch(self) -> Any:
        """Return a batch with one sequence, for use as fairseq's dummy batch."""
        return self.collate([self.dataset[0]])

    @property
    def next_epoch_idx(self) -> int:
        return self.epoch + self.end_of_epoch()

    def next_epoch_itr(
        self, shuffle: bool = True, fix_batches_to_gpus: bool = False, set_dataset_epoch: bool = True
    ) -> CountingIterator:
        """Return the batches of the next epoch or, after `load_state_dict`, the rest of the saved epoch."""
        if self.end_of_epoch():
            self.epoch, self.position = self.epoch + 1, 0
        generator = np.random.default_rng((*self.seed, self.epoch))
        order = [generator.permutation(part) if shuffle else part for part in self._parts]
        self._batches = self._cut(np.concatenate(order)[self.position :])
        own = [[*map(int, batch)] for batch in ShardedIterator(self._batches, self.num_shards, self.shard_id, [])]
        loader: Any = torch.utils.data.DataLoader(
            self.dataset,
            collate_fn=self.collate,
            batch_sampler=own,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )
        if self.buffer_size and self.num_workers:
            loader = BufferedIterator(self.buffer_size, loader)
        self._cur_epoch_itr = CountingIterator(loader, start=0, total=len(own))
        return self._cur_epoch_itr

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """Return a batch of samples; without samples, return a batch of one sequence that contains only padding."""
        if samples:
            return self.dataset.collater(samples)
        batch = self.dataset.collater([self.dataset[0]])
        batch["net_input"]["src_tokens"].fill_(self.pad)
        batch["target"].fill_(self.pad)
        batch["ntokens"] = batch["nsentences"] = 0
        return batch

    def end_of_epoch(self) -> bool:
        return self._cur_epoch_itr is not None and not self._cur_epoch_itr.has_next()

    @property
    def iterations_in_epoch(self) -> int:
        """Return the number of sequences (not batches) that all processes together have read in this epoch."""
        read = 0 if self._cur_epoch_itr is None else self._cur_epoch_itr.n * self.num_shards
        return self.position + sum(map(len, self._batches[:read]))

    def state_dict(self) -> dict[str, Any]:
        position = 0 if self.end_of_epoch() else self.iterations_in_epoch
        return {"version": POSITION_VERSION, "epoch": self.next_epoch_idx, "iterations_in_epoch": position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume at a saved position; raise AlmaError if the position is in batches or exceeds the epoch's length."""
        position = state_dict.get("iterations_in_epoch", 0)
        unit = "sequence" if state_dict.get("version") == POSITION_VERSION else "batch"
        self.epoch = state_dict["epoch"]
        num_sequences = sum(map(len, self._parts))
        if position and (unit == "batch" or position > num_sequences):
            raise AlmaError(
                f"{self.save_dir}: expected a position within the {num_sequences} sequences of the epoch, found "
                f"{unit} {position}; resume with the task and the data of the interrupted run, or give "
                "--reset-dataloader to begin the epoch again"
            )
        self.position = position
        self._cur_epoch_itr, self._batches = None, ()


@dataclass
class TextTaskConfig(CommandConfig, LanguageModelingConfig):
    """Options of fairseq's task ``language_modeling``, and options of other groups that the task reads."""

    tokens_per_sample: int = field(
        default=512,
        metadata={"help": "sequence length in tokens (default: 512; in fairseq-eval-lm, the length in the checkpoint)"},
    )
    reset_dataloader: bool = II("checkpoint.reset_dataloader")


AlmaLMConfig = fairseq_config("AlmaLMConfig", TextTaskConfig, [StageOptions, *FEATURES], "text")


@register_task("alma_lm", dataclass=AlmaLMConfig)
class AlmaLMTask(StageTask, LanguageModelingTask):
    """Language modeling task: train on the mega-batches of one stage, validate on ``valid``, test on ``test``.

    Attributes:
        stream: stream with the data.
        has_balance_loss: whether the model has a load-balancing loss.
        is_compiled: whether the training step is compiled.
    """

    kind, stream_config = "text", TextTaskConfig
    has_balance_loss = False
    is_compiled = False
    stream: Stream

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add the task's options, reject inexact precisions, and read the default sequence length from ``--path``."""
        is_command = isinstance(parser, argparse.ArgumentParser)  # false when fairseq lists the options of all tasks
        if is_command:
            refuse_inexact_precision(parser, evaluates=hasattr(parser.parse_known_args([])[0], "path"))
        super().add_args(parser)
        if is_command and (length := _length_in_checkpoint(parser)) is not None:
            parser.set_defaults(tokens_per_sample=length)

    @classmethod
    @in_one_line()
    def setup_task(cls, cfg: DictConfig, **kwargs: Any) -> "AlmaLMTask":
        """Open the stream and create the task.

        Raises:
            AlmaError: an option is out of range; the folder is not a text stream; the dictionary or tokenizer differs
                from the manifest; or ``--path`` is not a checkpoint.
        """
        check_options(cfg)
        for option in ("sample_break_mode", "past_target", "self_target", "future_target", "add_bos_token"):
            if str(getattr(cfg, option)) not in ("False", "none"):
                raise AlmaError(f"{flag(option)}: not supported; omit this option, because {OWNED[flag(option)]}")
        if cfg.tokens_per_sample < 1:  # fairseq has already subtracted the context window
            raise AlmaError(
                "--tokens-per-sample: must be positive and larger than --context-window; increase --tokens-per-sample "
                f"by {1 - cfg.tokens_per_sample} or more"
            )
        refuse_colon(cfg.data)
        stream = Stream.open(cfg.data, "text")
        stream.verify([])
        if cfg.path is not None:
            read_checkpoint(cfg.path)
        task = super().setup_task(cfg, **kwargs)
        task.stream, task.features = stream, features_of(cfg)
        load_for_task(str(cfg.continue_once), task.features.begin)
        return task

    @in_one_line()
    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """Load a split; ``train`` contains the mega-batches of the stage.

        Raises:
            AlmaError: ``--megabatch`` is not given or is not in the stream, or a file differs from the manifest.
        """
        if split != "train":
            self.stream.verify([self.stream.split(split).name])
            super().load_dataset(split, epoch, combine, **kwargs)
            return
        self.features[NewFirst].require_replay(self.args.replay)
        names, num_arrivals = self._stage()
        for name in names:
            super().load_dataset(name, epoch, combine, **kwargs)
        datasets = [self.datasets.pop(name) for name in names]
        num_all, num_new = (sum(map(len, each)) for each in (datasets, datasets[-num_arrivals:]))
        first = self.features[NewFirst].draw_first(num_all, num_new, self.args.seed)
        self.datasets["train"] = StageDataset(datasets, first)

    def _stage(self) -> tuple[list[str], int]:
        """Return the training splits of the stage and the number of new ones, which come last; verify the files."""
        last = self.args.megabatch
        if last is None:
            raise AlmaError("--megabatch: not given; give the last mega-batch of the stage to train on")
        self.stream.megabatch(last)  # raises an error if the mega-batch does not exist
        stage = stage_ending_with(last, self.stream.num_megabatches, self.args.wait, self.args.replay)
        names = [self.stream.megabatch(t).name for t in stage.megabatches]
        self.stream.verify(names)
        return names, len(stage.arrivals)

    def get_batch_iterator(self, dataset: FairseqDataset, **given: Any) -> EpochBatchIterating:
        """Return the batches of a split for this process; for ``train``, return a `SequenceBatches`.

        ``--required-batch-size-multiple`` has no effect, because this option would make fairseq drop batches.

        Raises:
            AlmaError: no batch size is given, or an option would exclude sequences.
        """
        require_batch_size(given)
        max_tokens, max_positions = given.get("max_tokens"), given.get("max_positions")
        max_sentences, length = given.get("max_sentences"), self.args.tokens_per_sample
        if isinstance(dataset, NestedDictionaryDataset):  # skip prompts that are too long
            given["ignore_invalid_inputs"] = True
        elif max_tokens is not None and max_tokens < length:
            raise AlmaError(
                f"--max-tokens {max_tokens}: must not be smaller than --tokens-per-sample {length}; give "
                f"--max-tokens {length} or more, or --tokens-per-sample {max_tokens} or less"
            )
        elif max_positions is not None and max_positions < length:
            raise AlmaError(
                f"--max-target-positions {max_positions}: must not be smaller than --tokens-per-sample "
                f"{length}; give --tokens-per-sample {max_positions} or less, or train with a larger "
                "--max-target-positions"
            )
        if not isinstance(dataset, StageDataset):
            return super().get_batch_iterator(dataset, **{**given, "required_batch_size_multiple": 1})
        if given.get("skip_remainder_batch"):
            raise AlmaError("--skip-remainder-batch: not supported, as each epoch uses all sequences; omit this option")
        return SequenceBatches(
            dataset,
            limits={"max_tokens": max_tokens, "max_sentences": max_sentences},
            seed=(given.get("seed", 1), self.args.megabatch or 0),
            first=dataset.first,
            shard=(given.get("shard_id", 0), given.get("num_shards", 1)),
            pad=self.source_dictionary.pad(),
            epoch=given.get("epoch", 1),
            num_workers=given.get("num_workers", 0),
            buffer_size=given.get("data_buffer_size", 0),
            save_dir=self.args.save_dir,
        )

    def filter_indices_by_size(
        self, indices: np.ndarray, dataset: FairseqDataset, *args: Any, **kwargs: Any
    ) -> np.ndarray:
        kept = super().filter_indices_by_size(indices, dataset, *args, **kwargs)
        if isinstance(dataset, NestedDictionaryDataset):
            for index in np.setdiff1d(indices, kept):
                print(f"skipped a prompt of {dataset.size(index)} tokens, more than the maximum length of the model")
        return kept

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> torch.nn.Module:
        """Build the model for training, or for evaluation if ``from_checkpoint``.

        Raises:
            AlmaError: dictionary, architecture, mega-batch or tensor shapes do not match the starting checkpoint.
        """
        with in_one_line():  # not a decorator, as fairseq inspects the signature
            if from_checkpoint:
                model = super().build_model(cfg, from_checkpoint)
                # Features wrap forward here, because fairseq-eval-lm does not call the criterion.
                model.forward = self.features.around_forward(model)(model.forward)
                return model
            start, resumes = self.find_start(self.args)
            model_class: Any = ARCH_MODEL_REGISTRY.get(cfg._name)
            if hasattr(model_class, "complete_options"):
                # If --arch is the name of a model, fairseq builds the model from a copy of cfg and saves only cfg.
                model_class.complete_options(cfg, start)
            try:
                check_config({**(vars(cfg) if isinstance(cfg, argparse.Namespace) else cfg)})
            except UnfitCheckpoint as error:  # the checkpoints of this training run could not be read
                raise AlmaError(f"--arch {cfg._name}: {error}; give another --arch") from error
            if start is not None:
                checkpoint = read_checkpoint(start)
                if resumes and not self.args.reset_dataloader:
                    self._refuse_other_order(checkpoint, start)
                check_dictionary(checkpoint, start, self.stream)
                model = self.build_to_continue(cfg, checkpoint, start)
            else:
                model = super().build_model(cfg)
                if hasattr(model, "init_from_text"):
                    names, _ = self._stage()
                    parts = [TokenFile(self.stream.root / name).ids[: MAX_TOKENS // len(names)] for name in names]
                    model.init_from_text(torch.from_numpy(np.concatenate(parts).astype(np.int64)))
        gates = [weight for name, weight in model.named_parameters() if name.endswith(".gate.weight")]
        self.is_compiled = getattr(model, "is_compiled", False)
        self.has_balance_loss = getattr(model, "balance_loss_weight", 0.0) > 0 and any(len(gate) > 1 for gate in gates)
        return model

    def _refuse_other_order(self, checkpoint: Checkpoint, path: str) -> None:
        """Raise AlmaError if resuming from a checkpoint would leave out training data or read data twice."""
        before = checkpoint["cfg"].get("task") or {}
        trained = before.get("megabatch")
        if trained is not None and self.args.megabatch not in (None, trained):
            raise AlmaError(
                f"{path}: trained on mega-batch {trained}, not on --megabatch {self.args.megabatch}; give another "
                f"--save-dir, and {WEIGHTS_FLAG} {path} to start from these weights"
            )
        iterator = (checkpoint.get("extra_state") or {}).get("train_iterator") or {}
        for name in ORDER_OPTIONS if iterator.get("iterations_in_epoch") else ():
            if name in before and str(before[name]) != str(getattr(self.args, name)):
                raise AlmaError(
                    f"{path}: expected {flag(name)} {before[name]} of the interrupted epoch, found "
                    f"{getattr(self.args, name)}; give the same option, or --reset-dataloader to begin the epoch again"
                )

    def build_criterion(self, cfg: Any) -> Any:
        """Build the criterion; warn if the criterion omits the balance loss of the model.

        Raises:
            AlmaError: ``--compile`` is given, but the criterion or the machine does not support torch.compile.
        """
        criterion = super().build_criterion(cfg)
        if self.is_compiled:
            from torch._inductor.cpp_builder import get_cpp_compiler
            from torch._inductor.exc import InvalidCxxCompiler
            from torch.utils._triton import has_triton

            if cfg._name != BALANCING:
                raise AlmaError(f"--compile: requires --criterion {BALANCING}; give this criterion, or omit --compile")
            try:
                get_cpp_compiler()
            except InvalidCxxCompiler:
                raise AlmaError("--compile: no C++ compiler found; install g++, or omit --compile") from None
            if self.features.setting.device != "cpu" and not has_triton():
                raise AlmaError("--compile: Triton is not installed, or does not support this GPU; omit --compile")
        if self.has_balance_loss and cfg._name != BALANCING:
            logging.getLogger(__name__).warning(
                f"--criterion {cfg._name}: trains without load-balancing loss; give --criterion {BALANCING}, or "
                "--balance-loss-weight 0 to disable this warning"
            )
        return criterion

    def build_dataset_for_inference(
        self, src_tokens: list[torch.Tensor], src_lengths: Any, **kwargs: Any
    ) -> NestedDictionaryDataset:
        """Return a dataset of prompts for generation: each prompt begins with EOS and is padded on the right.

        This method replaces the implementation of fairseq, which fails with NumPy 2 (``TokenBlockDataset``). Each
        prompt in ``src_tokens`` ends with EOS (removed here). ``src_lengths`` and ``constraints`` are ignored.
        """
        pad, eos = self.source_dictionary.pad(), self.source_dictionary.eos()
        lengths = np.array([len(tokens) for tokens in src_tokens])
        prompts = StripTokenDataset(ListDataset(src_tokens, lengths), eos)
        sources = PrependTokenDataset(prompts, eos)
        inputs = {"src_tokens": PadDataset(sources, pad, left_pad=False), "src_lengths": NumelDataset(sources)}
        target = PadDataset(AppendTokenDataset(prompts, pad), pad, left_pad=False)
        return NestedDictionaryDataset({"id": IdDataset(), "net_input": inputs, "target": target}, sizes=[lengths])

    def build_bpe(self, args: Any) -> Any:
        """Return the tokenizer of ``--bpe`` (default: tokenizer of the stream); called by fairseq-interactive."""
        return super().build_bpe(args) or AlmaBPE(AlmaBPEConfig(data=self.args.data))

    def eval_lm_dataloader(
        self, *args: Any, max_positions: Optional[int] = None, context_window: int = 0, **kwargs: Any
    ) -> Iterator[dict[str, Any]]:
        """Return the iterator of fairseq-eval-lm over the test batches; each process reads all batches.

        Raises:
            AlmaError: test sequences exceed the maximum length of the model, so that fairseq-eval-lm would skip them.
        """
        length = self.args.tokens_per_sample + context_window  # fairseq has already subtracted the context window
        if max_positions is not None and length > max_positions:
            raise AlmaError(
                f"--tokens-per-sample {length}: must be at most {max_positions}, the maximum length of the model; give "
                f"--tokens-per-sample {max_positions} or less"
            )
        if distributed_utils.get_global_rank() == 0:
            ensure_printed(logging.getLogger("fairseq_cli.eval_lm"))
        if distributed_utils.get_global_world_size() > 1:
            kwargs |= {"num_shards": 1, "shard_id": 0}
        if context_window:  # each worker would take the context from its own previous batch
            kwargs["num_workers"] = 0
        return super().eval_lm_dataloader(*args, max_positions=max_positions, context_window=context_window, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), DICTIONARY_KEY: self.stream.dictionary_sha256}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check the vocabulary of a checkpoint; called by fairseq-eval-lm.

        Raises:
            AlmaError: the model was trained with a vocabulary that differs from the vocabulary of the stream.
        """
        check_dictionary({"task_state": state_dict}, self.args.path, self.stream)
        super().load_state_dict(state_dict)


def _length_in_checkpoint(parser: argparse.ArgumentParser) -> Optional[int]:
    """Return the sequence length in the checkpoint ``--path``; None if not found, or if the user gives a length."""
    if parser.get_default("context_window") is None:
        return None
    command = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    command.add_argument("--path", default="")
    command.add_argument("--tokens-per-sample")
    with contextlib.suppress(argparse.ArgumentError, AlmaError):  # the full parser or `setup_task` reports the error
        given = command.parse_known_args()[0]
        if given.tokens_per_sample is None and os.path.isfile(given.path):
            length = read_checkpoint(given.path)["cfg"].get("task", {}).get("tokens_per_sample")
            return length if isinstance(length, int) and length > 0 else None
    return None


def ensure_printed(logger: logging.Logger) -> None:
    """Make a logger print INFO messages to the terminal, even if a library has already configured logging."""
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    handlers = [*logger.handlers, *(logging.root.handlers if logger.propagate else ())]
    to_terminal = [each for each in handlers if isinstance(each, logging.StreamHandler)]
    if not any(not isinstance(each, logging.FileHandler) and each.level <= logging.INFO for each in to_terminal):
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s"))
        logger.addHandler(handler)
