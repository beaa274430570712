"""Batches of a stream's held-out split for a checkpoint's model, through the task that trained it."""

import argparse
from typing import Any, Iterator

from omegaconf import OmegaConf

from fairseq_alma.checkpoints import LAST_CHECKPOINT
from fairseq_alma.checkpoints.checkpoint_file import Checkpoint
from fairseq_alma.data.stream import Stream
from fairseq_alma.tasks.alma_lm import AlmaLMConfig, AlmaLMTask, check_dictionary


class HeldOutBatches:
    """An iterable of batches with a length.

    Attributes:
        pad: index of the padding symbol.
    """

    def __init__(self, task: AlmaLMTask, split: str, batch_size: int) -> None:
        self.pad = task.source_dictionary.pad()
        task.load_dataset(split)
        self.batches = task.get_batch_iterator(
            task.dataset(split), max_sentences=batch_size, ignore_invalid_inputs=True
        ).next_epoch_itr(shuffle=False)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.batches)


def held_out_batches(checkpoint: Checkpoint, args: argparse.Namespace) -> HeldOutBatches:
    """Open the stream ``args.stream`` and return the batches of ``args.split``.

    Raises:
        AlmaError: if it is no stream of text, has another dictionary than the checkpoint, or lacks the split.
    """
    check_dictionary(checkpoint, args.path, Stream.open(args.stream))
    length = args.tokens_per_sample or checkpoint["cfg"]["model"]["tokens_per_sample"]
    config = AlmaLMConfig(data=args.stream, tokens_per_sample=length)
    for name, value in {"path": None, "finetune_from_model": None, "restore_file": LAST_CHECKPOINT}.items():
        setattr(config, name, value)
    config.seed, config.dataset_impl, config.use_plasma_view = 1, None, False
    config.plasma_path, config.max_target_positions = "", None
    return HeldOutBatches(AlmaLMTask.setup_task(OmegaConf.structured(config)), args.split, args.batch_size)
