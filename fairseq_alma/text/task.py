"""Language modeling on a stream of mega-batches: fairseq's own task, fed one stage of Algorithm 1.

A stage trains on the sequences of its mega-batches, and some of earlier ones. fairseq composes batches once per
process, from an order that it draws with the seed of the epoch in which the process starts; only the order of the
batches is drawn anew for each epoch. After a restart in a later epoch other sequences would stand together, so batches
are composed here as in a process that starts with the first epoch.

Process r of W takes the batches r, W + r, 2W + r, … of the epoch's one order, so ``W`` processes with ``--update-freq
U`` train as one with ``--update-freq W x U``. Two cases need care beside fairseq's own iterator:

- the last update of an epoch, for which some processes have no batch left. fairseq then drops what the process had for
  this update from loss, tokens and divisor, but not from the gradient. Here it gets a batch of padding;
- a resume with another W. fairseq counts the batches of each process; here the checkpoint says among how many
  processes (``extra_state["train_iterator"]["num_shards"]``).
"""

import argparse
import contextlib
import functools
import logging
import math
import os
import sys
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator, Mapping, Optional, Sequence

import numpy as np
import torch
from fairseq.data import (
    AppendTokenDataset,
    BaseWrapperDataset,
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
from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass import FairseqDataclass
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from omegaconf import II, DictConfig

from fairseq_alma.checkpoints.checkpoint_file import DICTIONARY_KEY, read_checkpoint
from fairseq_alma.checkpoints.ensemble_file import check_dictionary
from fairseq_alma.checkpoints.model_options import from_weights
from fairseq_alma.data.stream import Stream, megabatch_of_slice
from fairseq_alma.data.tokens import StreamTokenizer
from fairseq_alma.errors import AlmaError, in_one_line
from fairseq_alma.learners.learner import StageOptions, stage_ending_with
from fairseq_alma.training.autocast import refuse_inexact_precision
from fairseq_alma.training.fairseq_options import check_whole_config, fairseq_config
from fairseq_alma.training.feature import FEATURES, register_feature
from fairseq_alma.training.loading import (
    change_when_loaded,
    check_start,
    check_weights,
    note_task,
    refuse_other_weights,
)
from fairseq_alma.training.processes import is_first, prepare_group
from fairseq_alma.training.saves import SaveInBackground, TimedSaves
from fairseq_alma.training.stage_task import CommandConfig, StageTask, WholeSplit, features_of, whole_share

NUM_SHARDS = "num_shards"

Batch = dict[str, Any]


class ShuffledConcatDataset(ConcatDataset):
    """The union of several mega-batches, its sequences in random order within one length.

    fairseq's own ``ConcatDataset`` orders by length alone, which leaves neighbouring sequences of a document in one
    batch; ``MonolingualDataset`` shuffles first, and so does this. fairseq seeds NumPy around the call.
    """

    def ordered_indices(self) -> np.ndarray:
        """Return all indices, sorted by length, in random order where lengths are equal."""
        return np.lexsort([np.random.permutation(len(self)), self.sizes])


class ChosenSequences(BaseWrapperDataset):
    """Some sequences of a data set, in the order given; one may come several times.

    Args:
        dataset: where they are from.
        indices: (N,) of the sequences.
    """

    def __init__(self, dataset: FairseqDataset, indices: np.ndarray) -> None:
        super().__init__(dataset)
        self.indices = indices

    def __getitem__(self, index: int) -> dict[str, object]:
        return self.dataset[self.indices[index]]

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each sequence, (N,)."""
        return self.dataset.sizes[self.indices]

    def num_tokens(self, index: int) -> int:
        """Return the tokens of one sequence."""
        return self.dataset.num_tokens(self.indices[index])

    def size(self, index: int) -> int:
        """Return the length of one sequence."""
        return self.dataset.size(self.indices[index])

    def ordered_indices(self) -> np.ndarray:
        """Return all indices; who joins data sets shuffles them."""
        return np.arange(len(self))


def join_stage(new: Sequence[FairseqDataset], before: Sequence[FairseqDataset], drawn: Optional[np.ndarray]) -> Any:
    """Join a stage's mega-batches, and some sequences of earlier ones.

    Args:
        new: the mega-batches.
        before: all earlier ones.
        drawn: numbers of sequences of these, counted through all; None: there are none.
    """
    if drawn is None:
        return ShuffledConcatDataset(new)
    return ShuffledConcatDataset([*new, ChosenSequences(ShuffledConcatDataset(before), drawn)])


def slice_of(dataset: FairseqDataset, num_tokens: int) -> ChosenSequences:
    """Choose sequences evenly from all over a mega-batch, of so many tokens together, or a little more.

    Args:
        dataset: the mega-batch.
        num_tokens: as many as its held-out slice has.
    """
    number = min(len(dataset), max(1, math.ceil(num_tokens / float(np.mean(dataset.sizes)))))
    return ChosenSequences(dataset, np.arange(number) * len(dataset) // number)


def stage_batches(
    build: Callable[..., EpochBatchIterator],
    task: Any,
    dataset: FairseqDataset,
    *args: Any,
    epoch: int = 1,
    **kwargs: Any,
) -> EpochBatchIterator:
    """Return fairseq's iterator over a split, as above.

    Args:
        build: fairseq's ``get_batch_iterator``.
        task: whose it is.
        dataset: the split.
        args: passed on.
        epoch: that the iterator begins with, from 1.
        kwargs: passed on; with ``update_epoch_batch_itr`` fairseq composes the batches anew for each epoch.
    """
    composes_anew = kwargs.get("update_epoch_batch_itr")
    before = task.dataset_to_epoch_iter.get(dataset)
    iterator = build(dataset, *args, epoch=epoch if composes_anew else 1, **kwargs)
    if iterator is not before and not composes_anew:  # else it knows its epoch
        iterator.epoch = max(epoch, 1)
    SharedBatches.take_over(iterator, task.source_dictionary.pad())
    return iterator


class SharedBatches(EpochBatchIterator):
    """fairseq's iterator over batches of text, as above."""

    @classmethod
    def take_over(cls, iterator: EpochBatchIterator, pad: int) -> None:
        """Turn fairseq's iterator, which its task builds, into one of this class.

        Args:
            iterator: not yet begun.
            pad: index of the padding symbol.
        """
        if isinstance(iterator, cls):
            return  # fairseq keeps an iterator for the next epoch
        iterator.__class__ = cls
        if iterator.num_shards > 1:
            iterator.collate_fn = functools.partial(
                collate_or_pad, iterator.collate_fn, iterator.dataset, iterator.frozen_batches[0][:1], pad
            )

    def state_dict(self) -> dict[str, Any]:
        """Return fairseq's state, and among how many processes the batches are dealt."""
        return {**super().state_dict(), NUM_SHARDS: self.num_shards}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue behind the batches that all processes have had, however many those were.

        Raises:
            AlmaError: if the processes cannot share what is left of the epoch evenly.
        """
        before, batches = state_dict.get(NUM_SHARDS, self.num_shards), state_dict.get("iterations_in_epoch", 0)
        if before * batches % self.num_shards:
            raise AlmaError(
                f"the checkpoint is in the middle of an epoch, {before * batches} batches behind its beginning, which "
                f"is no multiple of {self.num_shards} processes; resume with {before}, or with any other number whose "
                "product with --update-freq is the same"
            )
        super().load_state_dict({**state_dict, "iterations_in_epoch": before * batches // self.num_shards})


def collate_or_pad(
    collate: Callable[[list[Any]], Batch], dataset: Any, example: list[int], pad: int, samples: list[Any]
) -> Batch:
    """Collate samples, or make a batch that has no token and no target of an example where there are none."""
    if samples:
        return collate(samples)
    batch = collate([dataset[index] for index in example])
    batch["net_input"]["src_tokens"].fill_(pad)
    batch["target"].fill_(pad)
    batch["ntokens"] = batch["nsentences"] = 0
    return batch


@dataclass
class AlmaBPEConfig(FairseqDataclass):
    """Where the stream is: the task knows."""

    data: Optional[str] = II("task.data")


@register_bpe("alma", dataclass=AlmaBPEConfig)
class AlmaBPE:
    """Encode text to a line of dictionary symbols and back, as fairseq's encoders do.

    Args:
        cfg: names the stream's folder.
    """

    def __init__(self, cfg: AlmaBPEConfig) -> None:
        if cfg.data is None:
            raise AlmaError("--bpe alma: needs a stream to take the tokenizer from; give the stream's folder")
        self.tokenizer = StreamTokenizer.open(cfg.data)

    def encode(self, x: str) -> str:
        """Return the symbols of a text, separated by spaces."""
        return " ".join(self.tokenizer.encode(x))

    def decode(self, x: str) -> str:
        """Return the text of symbols that are separated by spaces."""
        return self.tokenizer.decode(x.split(" "))


@dataclass
class StreamConfig(CommandConfig, LanguageModelingConfig):
    """Options of ``language_modeling``, and what the command was told elsewhere."""

    tokens_per_sample: int = field(
        default=512,
        metadata={
            "help": "length of a training or test sequence, in tokens (fairseq-eval-lm: default that of the training)"
        },
    )
    reset_dataloader: bool = II("checkpoint.reset_dataloader")


register_feature(SaveInBackground)
register_feature(TimedSaves)
AlmaLMConfig = fairseq_config("AlmaLMConfig", StreamConfig, [StageOptions, *FEATURES], "text")
"""Options of ``--task alma_lm``: these, and those of the features of a training."""


@register_task("alma_lm", dataclass=AlmaLMConfig)
class AlmaLMTask(StageTask, LanguageModelingTask):
    """Train on the mega-batches of one stage, validate on ``valid``, test on ``test``.

    Attributes:
        stream: what it learns from.
        has_balance_loss: whether the model to train has experts whose loads are to be balanced.
        is_compiled: whether it is to be compiled.
    """

    kind, stream_config = "text", StreamConfig
    has_balance_loss = False
    is_compiled = False
    stream: Stream

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add the task's options to those of a stock command, and refuse or preset some of the latter."""
        if isinstance(parser, argparse.ArgumentParser):  # not so when fairseq lists the options of all tasks
            refuse_inexact_precision(parser, evaluates=hasattr(parser.parse_known_args([])[0], "path"))
        super().add_args(parser)
        if isinstance(parser, argparse.ArgumentParser) and (length := _length_of_tested(parser)) is not None:
            parser.set_defaults(tokens_per_sample=length)

    @classmethod
    @in_one_line()
    def setup_task(cls, cfg: DictConfig, **kwargs: Any) -> "AlmaLMTask":
        """Open the stream.

        Args:
            cfg: an `AlmaLMConfig`.
            kwargs: passed on.

        Raises:
            AlmaError: if a number is out of its option's range, the folder is no stream of text, its dictionary or
                tokenizer is not the manifest's, or the checkpoint that the command names is none.
        """
        check_whole_config(cfg)
        stream = Stream.open(cfg.data)
        if stream.kind != "text":
            raise AlmaError(f"{cfg.data}: a stream of {stream.kind}; --task alma_lm needs one made by alma-prep-text")
        stream.verify([])
        if cfg.path is not None:
            if os.pathsep in cfg.path and not os.path.exists(cfg.path):
                raise AlmaError(
                    f"--path {cfg.path}: names several checkpoints, and fairseq-eval-lm takes one; make one file of "
                    "them with alma-ensemble"
                )
            read_checkpoint(cfg.path)
        features = features_of(cfg)
        prepare_group({f"{cfg.data}/stream.json": stream.fingerprint})
        task = super().setup_task(cfg, **kwargs)
        task.stream, task.features, task.whole_split = stream, features, WholeSplit(cfg.path is not None)
        note_task("alma_lm")
        change_when_loaded(str(cfg.continue_once), features.begin)
        return task

    @in_one_line()
    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """Load a split; ``train`` is the union of the stage's mega-batches, ``megabatch-000/slice`` a part of one.

        Raises:
            AlmaError: if there is no such mega-batch, or files are not those of the manifest.
        """
        if (megabatch := megabatch_of_slice(split)) is not None:
            held_out = self.stream.holdout(megabatch)
            (whole,) = self._load_megabatches([megabatch], epoch, combine, **kwargs)
            self.datasets[split] = slice_of(whole, held_out.num_tokens)
            return
        if split != "train":
            self.stream.verify([self.stream.split(split).name])
            super().load_dataset(split, epoch, combine, **kwargs)
            return
        megabatches = self._megabatches()
        first = megabatches[0] if self.features.draws_earlier else 0
        before = [range(start, start + self.args.wait) for start in range(0, first, self.args.wait)]
        stages = [self._load_megabatches(stage, epoch, combine, **kwargs) for stage in (*before, megabatches)]
        sizes = [[len(megabatch) for megabatch in stage] for stage in stages]
        drawn = self.features.draw_earlier(sizes, self.args.seed)
        *earlier, new = stages
        self.datasets["train"] = join_stage(new, [each for stage in earlier for each in stage], drawn)

    def _load_megabatches(
        self, megabatches: Iterable[int], epoch: int, combine: bool, **kwargs: Any
    ) -> list[FairseqDataset]:
        """Load some mega-batches as fairseq loads a split."""
        names = [self.stream.megabatch(t).name for t in megabatches]
        self.stream.verify(names)
        for name in names:
            super().load_dataset(name, epoch, combine, **kwargs)
        return [self.datasets.pop(name) for name in names]

    def _megabatches(self) -> tuple[int, ...]:
        if self.args.megabatch is None:
            raise AlmaError("--megabatch is missing: --task alma_lm trains on the stage that ends with this mega-batch")
        self.stream.megabatch(self.args.megabatch)  # names the range if there is no such mega-batch
        return stage_ending_with(
            self.args.megabatch, self.stream.num_megabatches, self.args.wait, self.args.replay
        ).megabatches

    def filter_indices_by_size(self, indices: np.ndarray, *args: Any, **kwargs: Any) -> np.ndarray:
        """Leave out sequences that the model cannot take, as fairseq does. Raises AlmaError if none would be left."""
        kept = super().filter_indices_by_size(indices, *args, **kwargs)
        if len(indices) and not len(kept):
            raise AlmaError(
                f"--tokens-per-sample {self.args.tokens_per_sample}: with --sample-break-mode "
                f"{self.args.sample_break_mode} every sequence is longer; give more, or --sample-break-mode none"
            )
        return kept

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> torch.nn.Module:
        """Build the model, after a look whether the checkpoint to start from fits it."""
        with in_one_line():  # no decorator: fairseq looks at the names of the arguments
            model = self._build_checked(cfg, from_checkpoint)
        gates = [weight for name, weight in model.named_parameters() if name.endswith("switch.gate.weight")]
        self.is_compiled = not from_checkpoint and getattr(model, "is_compiled", False)
        if self.is_compiled:
            require_compiler(self.features.setting.device)
        self.has_balance_loss = getattr(model, "balance_loss_weight", 0.0) > 0 and any(len(gate) > 1 for gate in gates)
        return model

    def _build_checked(self, cfg: Any, from_checkpoint: bool) -> torch.nn.Module:
        model_class: Any = ARCH_MODEL_REGISTRY.get(cfg._name)
        if not from_checkpoint and hasattr(model_class, "complete_options"):
            # here too: fairseq hands models without a named architecture a copy, which is not saved
            model_class.complete_options(cfg, self.args.continue_once)
        if from_checkpoint:
            model = super().build_model(cfg, from_checkpoint)
            refuse_other_weights(model, str(self.args.path))
            model.forward = self.features.around(model.forward, model)  # fairseq-eval-lm calls it without a step here
            return model
        start, resumes = self.find_start(self.args)
        if start is None:
            return self.features.wrap(super().build_model(cfg, from_checkpoint))
        checkpoint = read_checkpoint(start)
        if resumes and not self.args.reset_dataloader:
            self._refuse_other_stage(checkpoint["cfg"].get("task") or {}, start)
        check_start(checkpoint, start, cfg, self.stream)
        model = super().build_model(cfg, from_checkpoint)
        check_weights(checkpoint, start, model)
        return self.features.wrap(model)

    def _refuse_other_stage(self, trained: Mapping[str, Any], last: str) -> None:
        """Raise AlmaError if a checkpoint that would be resumed is of another mega-batch: fairseq would skip data."""
        megabatch = trained.get("megabatch")
        if megabatch is not None and self.args.megabatch not in (None, megabatch):
            raise AlmaError(
                f"{last}: trained on mega-batch {megabatch}, not on --megabatch {self.args.megabatch}; give another "
                f"--save-dir, and {' '.join(from_weights(last))} to begin with its weights"
            )

    def build_criterion(self, cfg: Any) -> Any:
        """Build the criterion, and warn where experts are trained without their balance loss."""
        criterion = super().build_criterion(cfg)
        if self.is_compiled and cfg._name != "alma_switch_cross_entropy":
            raise AlmaError("--compile: goes with --criterion alma_switch_cross_entropy; leave out one of the two")
        if self.has_balance_loss and cfg._name != "alma_switch_cross_entropy":
            logging.getLogger(__name__).warning(
                "the balance loss of the experts is left out, as --criterion is not alma_switch_cross_entropy; "
                "--balance-loss-weight 0 says so"
            )
        return criterion

    @property
    def checkpoint_path(self) -> Optional[str]:
        """The file that ``--path`` names; an ensemble's members are found beside it."""
        return self.args.path

    def build_dataset_for_inference(
        self, src_tokens: list[torch.Tensor], src_lengths: Any, **kwargs: Any
    ) -> NestedDictionaryDataset:
        """Return prompts as fairseq's generators take them: eos (or bos) in front, padded on the right.

        fairseq's own version goes through ``TokenBlockDataset``, which does not run with NumPy 2 here.

        Args:
            src_tokens: the prompts, each ending with eos.
            src_lengths: unused, the prompts have their lengths.
            kwargs: fairseq-interactive's ``constraints``, which language models do not have.
        """
        pad, eos = self.source_dictionary.pad(), self.source_dictionary.eos()
        first = self.source_dictionary.bos() if self.args.add_bos_token else eos
        lengths = np.array([len(tokens) for tokens in src_tokens])
        prompts = StripTokenDataset(ListDataset(src_tokens, lengths), eos)
        sources = PrependTokenDataset(prompts, first)
        inputs = {"src_tokens": PadDataset(sources, pad, left_pad=False), "src_lengths": NumelDataset(sources)}
        target = PadDataset(AppendTokenDataset(prompts, pad), pad, left_pad=False)
        return NestedDictionaryDataset({"id": IdDataset(), "net_input": inputs, "target": target}, sizes=[lengths])

    def get_batch_iterator(self, *args: Any, **kwargs: Any) -> EpochBatchIterator:
        """Return the batches of a split, those of this process where there are several; see `stage_batches`.

        ``--required-batch-size-multiple`` is ignored: fairseq drops the last batch of an epoch unless its size is a
        multiple of it, 8 by default, so that part of a mega-batch would never be trained on or validated with.
        """
        kwargs["required_batch_size_multiple"] = 1
        return stage_batches(super().get_batch_iterator, self, *args, **kwargs)

    def build_bpe(self, args: Any) -> Any:
        """Return the stream's own tokenizer unless ``--bpe`` names another; fairseq-interactive calls this."""
        return super().build_bpe(args) or AlmaBPE(AlmaBPEConfig(data=self.args.data))

    def eval_lm_dataloader(
        self, *args: Any, max_positions: Optional[int] = None, context_window: int = 0, **kwargs: Any
    ) -> Iterator[dict[str, Any]]:
        """Return fairseq's iterator, once sure that fairseq-eval-lm's result will be seen, and will be one.

        ``fairseq-eval-lm`` prints its result through a logger, and sets that up only if no library did so before. And
        it skips what is longer than the model takes: all that is left might be the last few tokens of the test set.

        Raises:
            AlmaError: if test sequences are longer than the model takes.
        """
        length = self.args.tokens_per_sample + context_window  # fairseq has taken the window off before
        if max_positions is not None and length > max_positions:
            raise AlmaError(
                f"--tokens-per-sample {length}: the model takes sequences of {max_positions} tokens at most; give "
                f"--tokens-per-sample {max_positions} or less"
            )
        if is_first():
            ensure_printed(logging.getLogger("fairseq_cli.eval_lm"))
        kwargs |= {"max_positions": max_positions, "context_window": context_window, **whole_share()}
        return super().eval_lm_dataloader(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the task: which vocabulary the model knows."""
        return {**super().state_dict(), DICTIONARY_KEY: self.stream.dictionary_sha256}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that a checkpoint's model knows this stream's vocabulary; fairseq-eval-lm calls this.

        Raises:
            AlmaError: if it was trained with another.
        """
        check_dictionary({"task_state": state_dict}, self.args.path, self.stream)
        super().load_state_dict(state_dict)


def require_compiler(device: str) -> None:
    """Raise AlmaError if what torch.compile needs to make code for a device is not there."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise AlmaError("--compile: no C++ compiler was found; install g++, or leave the option out") from None
    if device != "cpu" and not has_triton():
        raise AlmaError("--compile: Triton was not found, or takes no such GPU; leave the option out")


def _length_of_tested(parser: argparse.ArgumentParser) -> Optional[int]:
    """Return the length of sequence that the checkpoint of ``fairseq-eval-lm --path`` was trained with, if it tells."""
    if parser.get_default("context_window") is None:
        return None
    command = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    command.add_argument("--path", default="")
    command.add_argument("--tokens-per-sample")
    try:
        given = command.parse_known_args()[0]
    except argparse.ArgumentError:  # which the whole parser reports
        return None
    if given.tokens_per_sample is not None or not os.path.isfile(given.path):
        return None
    with contextlib.suppress(AlmaError):  # which `setup_task` raises again
        length = read_checkpoint(given.path)["cfg"].get("task", {}).get("tokens_per_sample")
        return length if isinstance(length, int) and length > 0 else None
    return None


def ensure_printed(logger: logging.Logger) -> None:
    """Make sure that a logger's messages of level INFO reach the terminal, whatever set up logging before."""
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    here: Optional[logging.Logger] = logger
    while here is not None:
        if any(_prints(handler) for handler in here.handlers):
            return
        here = here.parent if here.propagate else None
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s"))
    logger.addHandler(handler)


def _prints(handler: logging.Handler) -> bool:
    to_terminal = isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler)
    return to_terminal and handler.level <= logging.INFO
