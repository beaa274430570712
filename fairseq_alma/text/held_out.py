"""One pass of a Switch language model over a stream's held-out split: its loss, and each expert's part in it."""

import argparse
from dataclasses import dataclass
from typing import Any, Iterable, Iterator

import torch
from fairseq import utils
from fairseq.models import BaseFairseqModel
from omegaconf import OmegaConf

from fairseq_alma.checkpoints import LAST_CHECKPOINT
from fairseq_alma.checkpoints.checkpoint_file import Checkpoint
from fairseq_alma.checkpoints.ensemble_file import check_dictionary
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.moe.expert_losses import ExpertLosses
from fairseq_alma.text.linear_cross_entropy import token_losses
from fairseq_alma.text.task import AlmaLMConfig, AlmaLMTask


class HeldOutBatches:
    """Batches of a held-out split for a checkpoint's model, through the task that trained it.

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
        AlmaError: if it is no stream of text, has another dictionary than the checkpoint, or lacks the split, or if the
            sequences are longer than the model takes.
    """
    check_dictionary(checkpoint, args.path, Stream.open(args.stream))
    model = checkpoint["cfg"]["model"]
    length = args.tokens_per_sample or model["tokens_per_sample"]
    longest = model.get("max_target_positions") or model["tokens_per_sample"]
    if length > longest:
        raise AlmaError(f"--tokens-per-sample {length}: the model takes {longest} tokens at most; give no more")
    config = AlmaLMConfig(data=args.stream, tokens_per_sample=length)
    elsewhere = {
        "path": None,
        "finetune_from_model": None,
        "restore_file": LAST_CHECKPOINT,
        "save_dir": "",
        "continue_once": None,
        "reset_dataloader": False,
        "cpu": True,
    }
    for name, value in elsewhere.items():
        setattr(config, name, value)
    config.seed, config.dataset_impl, config.use_plasma_view = 1, None, False
    config.plasma_path, config.max_target_positions = "", None
    return HeldOutBatches(AlmaLMTask.setup_task(OmegaConf.structured(config)), args.split, args.batch_size)


@dataclass(frozen=True)
class HeldOutLosses:
    """What one pass has measured.

    Attributes:
        experts: sums in fp64 and int64, on the CPU.
        num_tokens: tokens in all.
        loss: mean loss per token, in nats.
    """

    experts: ExpertLosses
    num_tokens: int
    loss: float


@torch.no_grad()
def measure_expert_losses(model: BaseFairseqModel, batches: Iterable[dict[str, Any]], pad: int) -> HeldOutLosses:
    """Sum up, for every expert of every Switch layer, the losses of the tokens that are routed to it.

    Args:
        model: a Switch language model.
        batches: batches of fairseq's language modeling data.
        pad: index of the padding symbol, whose targets do not count.
    """
    model.eval()
    device = next(model.parameters()).device
    experts = ExpertLosses()
    total, num_tokens = 0.0, 0
    for batch in batches:
        batch = utils.move_to_cuda(batch, device=device) if device.type == "cuda" else batch
        features, extra = model(**batch["net_input"], features_only=True)
        target = batch["target"].flatten()
        is_real = target != pad
        factors, weight = model.output_factors(features)
        losses = token_losses(factors.flatten(0, -2), weight, target).masked_fill(~is_real, 0.0).double()
        experts.add_routed(losses, extra["routing"], is_real)
        total += losses.sum().item()
        num_tokens += int(is_real.sum())
    return HeldOutLosses(experts, num_tokens, total / max(num_tokens, 1))
