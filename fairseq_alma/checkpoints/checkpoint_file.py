"""Read and write checkpoint files of fairseq and of this package. No fairseq imports.

Loading a checkpoint runs no code from the file: torch loads only tensors and plain data, and `check_config` allows only
known models. For many architectures, fairseq passes option strings to Python's ``eval``; `check_config` rejects these
architectures, and the options of ``transformer_lm`` for which fairseq calls ``eval``. `read_checkpoint` verifies the
checksums of the archive and rejects truncated or damaged files.
"""

import re
from argparse import Namespace
from pathlib import Path
from typing import Any, Collection, Mapping, Optional, Union

import torch
from torch import Tensor, nn

from fairseq_alma.checkpoints import AVERAGE, IMAGE_TASK_STATE, JOINT_MODEL, TASK_STATE
from fairseq_alma.checkpoints.model_options import SWITCH_SIZES, TRANSFORMER_SIZES
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import archive_fault, open_atomically

ENSEMBLE_ARCH = "alma_ensemble"
IMAGE_ARCHITECTURES = ("alma_mlp", "alma_vgg", "alma_moe_mlp", "alma_moe_vgg", "alma_firefly_vgg")
_STOCK_SIZES = (
    "big wiki103 baevski_wiki103 gbw baevski_gbw gpt gpt2_small gpt2_tiny gpt2_medium gpt2_big gpt2_big_wide "
    "gpt2_bigger gpt3_small gpt3_medium gpt3_large gpt3_xl gpt3_2_7 gpt3_6_7 gpt3_13 gpt3_175"
)
TRANSFORMER_LMS = ("transformer_lm", *(f"transformer_lm_{size}" for size in _STOCK_SIZES.split()))
SINGLE_MODELS = (*SWITCH_SIZES, *TRANSFORMER_SIZES, *TRANSFORMER_LMS, *IMAGE_ARCHITECTURES)
# fairseq also ignores these tensors in checkpoints.
_IGNORED = (".embed_positions._float_tensor", ".embed_positions.weights", "decoder.version")
_VERSION = ".adaptive_softmax.version"  # integer buffer of fairseq
Weights = Mapping[str, Tensor]
Checkpoint = dict[str, Any]
# Key in ``task_state``. The value is the sha256 of the training vocabulary (``dict.txt``).
DICTIONARY_KEY = "alma_dictionary_sha256"
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class UnfitCheckpoint(ValueError):
    """Error for a file that is not a usable checkpoint. The message has no file name; the caller adds the file name."""


def check_config(config: Any, is_member: bool = False) -> None:
    """Raise UnfitCheckpoint if ``cfg.model`` or an ensemble member has an unsupported architecture or option."""
    name = config.get("_name")
    if name == ENSEMBLE_ARCH and not is_member:
        for entry in config["members"]:
            if "config" in entry:
                check_config(entry["config"], is_member=True)
        return
    is_joint, is_stock, member_arch = name == JOINT_MODEL, name in TRANSFORMER_LMS, config.get("member_arch")
    has_code = config.get("character_embeddings") or config.get("decoder_xformers_att_config") is not None
    cutoffs = [config.get(f"adaptive_{part}_cutoff") for part in ("input", "softmax")]
    has_other_cutoffs = any(each is not None and not re.fullmatch(r"\d{1,9}(,\d{1,9})*", str(each)) for each in cutoffs)
    removed = "only fairseq_alma 0.2.0 supports"
    for is_unfit, fault in (
        (name == ENSEMBLE_ARCH, f"{removed} ensembles of ensembles; join single models"),
        (is_joint and member_arch in SWITCH_SIZES, f"{removed} UMix of language models; train single models"),
        (
            is_joint and member_arch not in IMAGE_ARCHITECTURES,
            f"expected member architecture {' or '.join(IMAGE_ARCHITECTURES)}, found {member_arch!r:.60}",
        ),
        (
            name not in (JOINT_MODEL, *SINGLE_MODELS),
            f"expected architecture alma_… or transformer_lm…, found {name!s:.60}",
        ),
        (config.get("mup"), f"trained with --mup, which {removed}; train a model without --mup"),
        (config.get("group_layers"), f"{removed} Firefly networks that grew in depth; train a new one"),
        (is_stock and has_code, "models with character embeddings or xformers attention are not supported"),
        (is_stock and has_other_cutoffs, f"expected adaptive cutoffs such as 10000,50000, found {cutoffs!s:.60}"),
    ):
        if is_unfit:
            raise UnfitCheckpoint(fault)


def refuse_other_shapes(weights: Weights, model: nn.Module, path: str, remedy: str) -> None:
    """Raise AlmaError if ``weights`` and the tensors of ``model`` differ in names or shapes; devices may differ."""
    found, needed = ({name: tuple(each.shape) for name, each in part.items()} for part in (weights, model.state_dict()))
    found = {name: shape for name, shape in found.items() if name in needed or not name.endswith(_IGNORED)}
    wrong = sorted(name for name in needed.keys() & found.keys() if needed[name] != found[name])
    for problem, names in (
        ("lacks {} tensor(s)", sorted(needed.keys() - found.keys())),
        ("has {} unexpected tensor(s)", sorted(found.keys() - needed.keys())),
        ("has {} tensor(s) with a wrong shape", wrong),
    ):
        if names:
            first = f"first: {names[0]}"
            first += f", expected {needed[names[0]]}, found {found[names[0]]}" if names is wrong else ""
            raise AlmaError(f"{path}: the checkpoint {problem.format(len(names))} ({first}); {remedy}")


def read_checkpoint(
    path: Union[str, Path],
    mmap: bool = True,
    remedy: str = "give a checkpoint written by fairseq-train or alma-grow",
    needed: Collection[str] = (),
) -> Checkpoint:
    """Load a checkpoint on the CPU.

    Args:
        path: checkpoint file.
        mmap: whether to memory-map the file, so that torch reads a tensor from disk only when the tensor is used.
        remedy: next step for the user, appended to error messages.
        needed: required keys in addition to ``cfg`` and ``model``.

    Returns:
        The dictionary saved by fairseq, with keys such as ``cfg``, ``model`` and ``extra_state``.

    Raises:
        AlmaError: the file is missing, truncated, damaged, or not a checkpoint of a supported model.
    """
    path = Path(path)
    if not path.is_file():
        several = ", or join several checkpoints with alma-ensemble" if ":" in str(path) else ""
        raise AlmaError(f"{path}: no such checkpoint file; {remedy}{several}")
    try:
        checkpoint = load_archive(path, mmap)
        _check_content(checkpoint)
        if missing := [name for name in needed if checkpoint.get(name) is None]:
            raise UnfitCheckpoint(f"not a checkpoint written by fairseq-train (lacks {', '.join(missing)})")
    except UnfitCheckpoint as error:
        raise AlmaError(f"{path}: {error}; {remedy}") from error
    return checkpoint


def _check_content(checkpoint: Any) -> None:
    config = checkpoint.get("cfg") if isinstance(checkpoint, dict) else None
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict) or "model" not in checkpoint:
        raise UnfitCheckpoint("not a checkpoint of fairseq (lacks 'model' or 'cfg.model')")
    if checkpoint.get("args") is not None:
        raise UnfitCheckpoint("options in 'args' (checkpoint format of fairseq until 2020) are not supported")
    weights = checkpoint["model"]
    if not isinstance(weights, dict) or not all(isinstance(each, Tensor) for each in weights.values()):
        raise UnfitCheckpoint("damaged: 'model' is not a dictionary of weights")
    wrong = [name for name, each in weights.items() if each.dtype not in FLOATS and not name.endswith(_VERSION)]
    if wrong:
        raise UnfitCheckpoint(f"expected floating-point weights, found {wrong[0]} of type {weights[wrong[0]].dtype}")
    try:
        check_config(config["model"])
    except (TypeError, KeyError, AttributeError) as error:
        raise UnfitCheckpoint("damaged: the ensemble members in 'cfg' are invalid") from error


def load_archive(path: Path, mmap: bool) -> Any:
    """Load a file written by ``torch.save``, with tensors on the CPU. For the arguments, see `read_checkpoint`.

    Raises:
        UnfitCheckpoint: the file is damaged, or contains objects other than tensors and plain data.
    """
    if fault := archive_fault(path):
        raise UnfitCheckpoint(fault)
    with open(path, "rb") as file:
        try:
            # fairseq saves the options of some optimizers as a Namespace. torch opens the path twice; the path of the
            # file descriptor refers to the same file, even if another process replaces the checkpoint in between.
            with torch.serialization.safe_globals([Namespace]):
                return torch.load(f"/dev/fd/{file.fileno()}", map_location="cpu", weights_only=True, mmap=mmap)
        except OSError:
            raise
        except Exception as error:  # do not show torch's message: it advises unsafe loading
            name = str(error).partition("GLOBAL ")[2].partition(" ")[0] or "unreadable"
            raise UnfitCheckpoint(f"damaged, or contains objects ({name}) other than weights and plain data") from error


def untrained_checkpoint(cfg: Any, model: Mapping[str, Any], task_state: Mapping[str, Any]) -> Checkpoint:
    """Return a checkpoint with all keys that fairseq requires, but without optimizer state."""
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {"best": None}, "num_updates": 0}
    return {
        "args": None,
        "cfg": cfg,
        "model": dict(model),
        "criterion": None,
        "optimizer_history": [history],
        "task_state": dict(task_state),
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
    }


def write_checkpoint(checkpoint: Checkpoint, path: Union[str, Path]) -> None:
    """Write a checkpoint to a temporary file, then rename this file to ``path``."""
    with open_atomically(Path(path)) as file:
        torch.save(checkpoint, file)


def find_average(checkpoint: Checkpoint) -> Optional[dict[str, Any]]:
    """Return the entry of ``extra_state`` that contains averaged weights, or None if there is no such entry."""
    entries = (checkpoint.get("extra_state", {}).get(key) for key in (TASK_STATE, IMAGE_TASK_STATE))
    return next((each for each in entries if isinstance(each, dict) and isinstance(each.get(AVERAGE), dict)), None)


def with_shared_names(model: Mapping[str, Tensor], average: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``model`` with parameters replaced by averaged weights; buffers do not change.

    A shared parameter has one name in ``average``. The averaged weight replaces the parameter under all its names.
    """
    shared = {(model[name].data_ptr(), model[name].numel()): each for name, each in average.items() if name in model}
    weights = {name: shared.get((each.data_ptr(), each.numel()), each) for name, each in model.items()}
    return weights | {name: each for name, each in average.items() if name in model}


def write_average(path: Path, out: Path) -> None:
    """Write checkpoint ``path`` to ``out``, with the averaged weights as model weights, without optimizer state.

    Raises:
        AlmaError: the averaged weights are missing, or differ in names or shapes from the weights of the model.
    """
    checkpoint = read_checkpoint(path)
    if (entry := find_average(checkpoint)) is None:
        raise AlmaError(
            f"{path}: found no averaged weights in this checkpoint; train with --ema-half-life; on images, use "
            "checkpoint_average.pt, which has the averaged weights, without --average"
        )
    weights = with_shared_names(checkpoint["model"], entry[AVERAGE])
    wrong = [name for name, tensor in checkpoint["model"].items() if weights[name].shape != tensor.shape]
    if wrong or entry[AVERAGE].keys() - weights.keys():
        raise AlmaError(
            f"{path}: names or shapes of the averaged weights do not match the model; remove this file, and train again"
        )
    states = {name: each for name, each in checkpoint["extra_state"].items() if each is not entry}
    kept = {name: entry for name, entry in checkpoint.items() if name != "last_optimizer_state"}
    write_checkpoint({**kept, "model": weights, "extra_state": states}, out)


def check_dictionary(checkpoint: Checkpoint, path: Optional[str], stream: Stream) -> None:
    """Raise AlmaError if a checkpoint records a vocabulary that differs from the vocabulary of the stream."""
    found = checkpoint.get("task_state", {}).get(DICTIONARY_KEY, stream.dictionary_sha256)
    if found != stream.dictionary_sha256:
        raise AlmaError(
            f"{path}: expected the tokenizer of {stream.root} (dict.txt {stream.dictionary_sha256[:12]}…), found "
            f"another tokenizer, or a model of fairseq_alma 0.2.0 (dict.txt {found[:12]}…); give the training stream, "
            "or a stream with the same tokenizer (alma-prep-text --tokenizer); train a model of 0.2.0 again"
        )
