"""Losses of language models: criterion ``alma_switch_cross_entropy`` for training, and tests of a checkpoint.

The criterion is the cross entropy plus the load-balancing loss of Switch layers. The cross entropy of a linear output
layer is computed in chunks of tokens to save memory: with a vocabulary of 50,000, the fp32 logits of a batch of 32,768
tokens would take 6.6 GB. `evaluate` tests a checkpoint on several splits in one process, instead of running
fairseq-eval-lm for each split.

Letters: S tokens, M model dim, V vocabulary size.
"""

import json
import math
import zipfile
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Optional, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.logging import metrics
from fairseq.sequence_scorer import SequenceScorer
from torch import Tensor

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint
from fairseq_alma.checkpoints.ensemble_file import ENSEMBLE_ARCH, member_file
from fairseq_alma.errors import AlmaError, in_one_line
from fairseq_alma.files import open_atomically
from fairseq_alma.moe import SwitchLayer, SwitchStatistics
from fairseq_alma.training.stage_task import configuration_of

# Maximum number of logits of a chunk (tokens x V), 512 MiB in fp32. Smaller chunks are slower, because each chunk
# updates the complete weight gradient.
CHUNK_ELEMENTS = 2**27


class LinearCrossEntropy(torch.autograd.Function):
    """Autograd function of the cross entropy of ``softmax(features @ weight.T + bias)``, summed over tokens.

    This function replaces ``linear_cross_entropy`` of torch 2.13, which rounds the sum of a batch to bf16 in autocast.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, bias: Optional[Tensor], target: Tensor, ignore_index: int
    ) -> Tensor:
        ignored = target == ignore_index
        index = target.masked_fill(ignored, 0).unsqueeze(1)
        losses, grad_features, grad_weight = [], torch.empty_like(features), None
        for rows in _chunks(features, weight):
            logits = F.linear(features[rows], weight, bias)
            log_probs = logits.float()
            torch.log_softmax(log_probs, dim=1, out=log_probs)  # in place: allocation takes as long as the softmax
            losses.append(log_probs.gather(1, index[rows]).squeeze(1).masked_fill(ignored[rows], 0.0).sum())
            # d loss / d logits = softmax - one-hot. To mask ignored tokens, zero the smaller factor of each product.
            log_probs.exp_().scatter_add_(1, index[rows], torch.full_like(log_probs[:, :1], -1.0))
            grad_logits, mask = log_probs.to(logits.dtype), ignored[rows].unsqueeze(1)
            grad_features[rows] = (grad_logits @ weight).masked_fill_(mask, 0.0)
            product = grad_logits.t() @ features[rows].masked_fill(mask, 0.0)
            grad_weight = product.to(weight.dtype) if grad_weight is None else grad_weight.add_(product)
        ctx.save_for_backward(grad_features, grad_weight)
        return -torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Optional[Tensor], ...]:
        grad_features, grad_weight = ctx.saved_tensors
        return grad_features * grads[0], grad_weight * grads[0], None, None, None


def linear_cross_entropy(
    features: Tensor, weight: Tensor, target: Tensor, ignore_index: int, bias: Optional[Tensor] = None
) -> Tensor:
    """Return the sum over tokens of the cross entropy of ``softmax(features @ weight.T + bias)``.

    Features are (S, M), weights (V, M), targets (S,) int64. The sum excludes tokens with the target ``ignore_index``.
    The sum is in fp32 and in nats. The (V,) bias has no gradient.
    """
    if not torch.is_grad_enabled():
        return token_losses(features, weight, target, bias).masked_fill(target == ignore_index, 0.0).sum()
    return LinearCrossEntropy.apply(features, weight, bias, target, ignore_index)


@torch.no_grad()
def token_losses(features: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """Return the cross entropy of each token, (S,) fp32 in nats; see `linear_cross_entropy` for the arguments."""
    losses = torch.empty(len(features), dtype=torch.float32, device=features.device)
    for rows in _chunks(features, weight):
        losses[rows] = F.cross_entropy(F.linear(features[rows], weight, bias).float(), target[rows], reduction="none")
    return losses


def _chunks(features: Tensor, weight: Tensor) -> Iterator[slice]:
    size = max(1, CHUNK_ELEMENTS // len(weight))
    size = size - size % 128 or size  # matrix products of a GPU work in tiles of 128 rows
    for start in range(0, len(features), size):
        yield slice(start, start + size)


@register_criterion("alma_switch_cross_entropy", dataclass=CrossEntropyCriterionConfig)
class AlmaSwitchCrossEntropy(CrossEntropyCriterion):
    """Sum of cross entropy and weighted load-balancing loss (Fedus et al. 2021, section 2.2).

    Metrics are averaged over the tokens of an update; with ``sentence_avg``, ``loss`` is averaged over sequences. The
    division of an update into batches and processes changes results only through the balance loss and the capacity of
    experts, which are computed for each batch. Metrics:

    - ``loss``: sum of cross entropy and weighted load-balancing loss, in bits
    - ``nll_loss``, ``ppl``: the cross entropy in bits, and its perplexity
    - ``balance_loss``: unweighted load-balancing loss, mean over Switch layers; 1 if token shares are equal
    - ``switch{n}_dropped``: share of the tokens that Switch layer n drops
    - ``switch{n}_expert{e}``: share of the tokens routed to expert e of Switch layer n, including dropped tokens
    - ``switch{n}_entropy``: mean entropy of the gate's probabilities in Switch layer n, in nats

    Args:
        task: task that provides the padding index.
        sentence_avg: divide gradients by the number of sequences instead of tokens.
    """

    _compiled: Optional[Callable[..., tuple[Tensor, Sequence[SwitchStatistics]]]] = None

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Return (sum of losses in nats, sample size, log output) of a batch; fairseq divides by the sample size."""
        if not reduce:
            raise ValueError("alma_switch_cross_entropy requires reduce=True; call token_losses for losses per token")
        if getattr(getattr(model, "decoder", None), "output_projection", None) is None:
            raise AlmaError(
                "--criterion alma_switch_cross_entropy: requires a language model with an output projection; give "
                "--criterion cross_entropy for other language models, or alma_image_cross_entropy for images"
            )
        compute: Any = self._losses
        if model.training and getattr(model, "is_compiled", False):
            if self._compiled is None:
                # A compiled graph cannot read token counts on the host. As a decorator, `disable` would add a second to
                # each start of a command, because the call imports torch._dynamo.
                SwitchLayer.forward = torch.compiler.disable(SwitchLayer.forward)  # type: ignore[method-assign]
                # Only two shapes occur: full batches, and the last batch of an epoch.
                self._compiled = torch.compile(self._losses, dynamic=False)
            compute = self._compiled
        nll_loss, switch = compute(model, sample["net_input"], sample["target"])
        # len(target) would be wrong for a process without a batch, which gets one row of padding.
        nsentences = sample.get("nsentences", len(sample["target"]))
        sample_size = nsentences if self.sentence_avg else sample["ntokens"]
        loss = nll_loss
        if switch:
            # fairseq divides the loss by the sample size, but the balance loss is already a mean.
            balance_loss = torch.stack([each.balance_loss for each in switch]).sum()
            loss = loss + model.balance_loss_weight * balance_loss * sample_size
        log = {
            "loss": loss.detach(),
            "nll_loss": nll_loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": nsentences,
            "sample_size": sample_size,
        }
        for number, each in enumerate(switch):  # sums over tokens, so that fairseq can add the logs of batches
            layer, num_tokens = f"switch{number}", sum(each.routed)
            log |= {
                f"{layer}_tokens": num_tokens,
                f"{layer}_balance": each.balance_loss.detach() * num_tokens,
                f"{layer}_dropped": each.num_dropped,
                f"{layer}_entropy": each.entropy,
                **{f"{layer}_expert{expert:02d}": routed for expert, routed in enumerate(each.routed)},
            }
        return loss, sample_size, log

    def _losses(self, model: Any, inputs: dict[str, Any], target: Tensor) -> tuple[Tensor, Sequence[SwitchStatistics]]:
        # ``--compile`` compiles this method.
        features, extra = model(**inputs, features_only=True)
        weight, bias = model.decoder.output_projection.weight, getattr(model.decoder, "logit_bias", None)
        nll_loss = linear_cross_entropy(features.flatten(0, 1), weight, target.flatten(), self.padding_idx, bias)
        return nll_loss, extra.get("switch", ())

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        sums = {key: float(sum(log[key] for log in logging_outputs)) for key in logging_outputs[0]}
        sample_size, ntokens, bits = sums["sample_size"], sums["ntokens"], 1 / math.log(2)
        metrics.log_scalar("loss", sums["loss"] / sample_size * bits, sample_size, round=3)
        metrics.log_scalar("nll_loss", sums["nll_loss"] / ntokens * bits, ntokens, round=3)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["nll_loss"].avg))
        routed = {key.removesuffix("_tokens"): sums[key] for key in sums if key.endswith("_tokens")}
        if routed:
            balance = sum(sums[f"{layer}_balance"] / tokens for layer, tokens in routed.items()) / len(routed)
            metrics.log_scalar("balance_loss", balance, ntokens, round=4)
        for layer, tokens in routed.items():
            for key in sorted(key for key in sums if key.startswith(f"{layer}_")):
                if not key.endswith(("_tokens", "_balance")):
                    metrics.log_scalar(key, sums[key] / tokens, tokens, priority=1000, round=4)


def joint_losses(
    text: str,
    members: Sequence[str],
    splits: Sequence[str],
    log_probs: Callable[[int, Sequence[str]], Iterable[tuple[str, np.ndarray]]],
    known: Optional[Path] = None,
    out: Optional[Path] = None,
) -> dict[str, float]:
    """Return the loss of an ensemble for each split: cross entropy of the members' mean probability, in bits per token.

    A growing ensemble consists of the members of the previous stage and new members. Therefore a file stores, for
    each token, the log of the sum of the members' probabilities (8 bytes), and this function tests only new members.
    The mean over tokens excludes infinite losses, as in fairseq.

    Args:
        text: string that identifies the test data and the sequence length.
        members: sha256 of the members' checkpoints, in order.
        splits: names of the splits.
        log_probs: function of (index of a member, splits) that yields (split, (N,) log-probabilities of its N tokens).
        known: file with the log-sums of the first members, ignored if ``text`` or a member differs; None: no file.
        out: file for the log-sums of all members; if a matching file exists, ``known`` is ignored. None: no file.
    """
    num_known, stored = next(filter(None, (_read_sums(path, text, members) for path in (out, known) if path)), (0, {}))
    log_sums: dict[str, Any] = {split: stored[split] for split in splits if split in stored}
    for number in range(len(members)):
        todo = [split for split in splits if number >= num_known or split not in stored]
        for split, found in log_probs(number, todo) if todo else ():
            found = found.astype(np.float64)
            log_sums[split] = np.logaddexp(log_sums[split], found) if split in log_sums else found
    if out is not None:
        with open_atomically(out) as file:
            np.savez(file, head=np.array(json.dumps([text, [*members]])), **log_sums)
    losses = {}
    for split, sums in log_sums.items():
        means = sums[np.isfinite(sums)] - math.log(len(members))
        losses[split] = float(-means.mean() / math.log(2)) if len(means) else 0.0
    return losses


def _read_sums(path: Path, text: str, members: Sequence[str]) -> Optional[tuple[int, dict[str, np.ndarray]]]:
    """Return (number of members, log-sums by split); None if no readable file matches ``text`` and ``members``."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        text_of_file, known = json.loads(str(arrays.pop("head")))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return (len(known), arrays) if text_of_file == text and known == [*members[: len(known)]] else None


@in_one_line()
def evaluate(known: Optional[Path] = None, out: Optional[Path] = None) -> dict[str, float]:
    """Test a checkpoint on several splits; return the loss for each split, in bits per token.

    The options in ``sys.argv`` are those of fairseq-eval-lm, with several splits in ``--gen-subset``. For a single
    model, the losses equal those of fairseq-eval-lm bit for bit.

    Args:
        known: for an ensemble, file with the combined predictions of members tested earlier; see `joint_losses`.
        out: for an ensemble, file for the combined predictions of all members.
    """
    from fairseq_cli import eval_lm  # configures logging, so that registering the criterion must not import it

    cfg = configuration_of(options.parse_args_and_arch(options.get_eval_lm_parser()))
    path, splits, task = cfg.common_eval.path, cfg.dataset.gen_subset.split(","), tasks.setup_task(cfg.task)
    config = read_checkpoint(path)["cfg"]["model"]
    members = config["members"] if config["_name"] == ENSEMBLE_ARCH else []

    def load(path: str) -> Any:
        (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([path], task=task)
        if torch.cuda.is_available() and not cfg.common.cpu:
            torch.cuda.set_device(cfg.distributed_training.device_id)
            model.cuda()
        model.prepare_for_inference_(cfg)
        return model

    def batches(split: str, model: Any) -> Iterator[dict[str, Any]]:
        """Yield the batches of a split, then close the split's files, because there may be thousands of splits."""
        task.load_dataset(split)
        yield from task.eval_lm_dataloader(
            dataset=task.datasets.pop(split),
            max_tokens=max(cfg.dataset.max_tokens or 36000, task.args.tokens_per_sample),
            batch_size=cfg.dataset.batch_size,
            max_positions=model.max_positions(),
            num_workers=cfg.dataset.num_workers,
            data_buffer_size=cfg.dataset.data_buffer_size,
        )
        task.dataset_to_epoch_iter.clear()

    def log_probs(number: int, splits: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        model = load(str(member_file(members[number], Path(path).parent)))
        scorer = SequenceScorer(task.target_dictionary)
        for split in splits:
            parts = []
            for batch in batches(split, model):
                batch = utils.move_to_cuda(batch, device=next(model.parameters()).device)
                parts += [hypothesis["positional_scores"] for (hypothesis,) in scorer.generate([model], batch)]
            yield split, torch.cat(parts).float().cpu().numpy()

    # The members of ensembles that alma-stream writes are files, and have equal weights.
    if members and all("path" in each and each["weight"] == members[0]["weight"] for each in members):
        stream = task.stream
        held_out = [file.sha256 for split in ("valid", "test") for file in stream.split(split).files]
        text = repr((stream.dictionary_sha256, task.args.tokens_per_sample, held_out))
        losses = joint_losses(text, [each["sha256"] for each in members], splits, log_probs, known, out)
    else:
        model, losses = load(path), {}
        for split in splits:
            found = eval_lm.eval_lm(
                models=[model],
                source_dictionary=task.source_dictionary,
                target_dictionary=task.target_dictionary,
                batch_iterator=batches(split, model),
            )
            losses[split] = float(found["loss"])
    for split, loss in losses.items():
        eval_lm.logger.info(f"{split}: {loss:.4f} bits per token")
    return losses
