"""Checkpoint files, fairseq's or ours: every command reads them here, and writes them here. No fairseq.

The archive is whole and unaltered; what comes from it is never run and never evaluated: plain data of bounded size.
What the commands use is declared as a type and held against it; further keys that fairseq writes are plain data.
Weights are finite numbers in the shapes of the model (`architecture`); anything else is refused in one line. Beside
weights there is their moving average, and what the optimizer remembers of them.
"""

import errno
import math
import os
import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Annotated, Any, Collection, Iterable, Literal, Mapping, Optional, Union

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor, UntypedStorage, nn

from fairseq_alma.checkpoints import AVERAGE, IMAGE_TASK_STATE, TASK_STATE, UnfitCheckpoint
from fairseq_alma.checkpoints.architecture import check_model
from fairseq_alma.errors import AlmaError
from fairseq_alma.files import VERIFIED, Count, file_identity, open_atomically

SCALARS = (type(None), bool, int, float, str)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_DEPTH = 50
MAX_VALUES = 300_000
"""How deep ``cfg`` is nested at most, and how many values it has; one that stands in two places counts twice."""
_MAX_SHARED = 4  # a tensor may have two names, as input and output embeddings; all tensors are at most so many files
_SMALL = 1 << 20  # bytes

Word = Annotated[str, Meta(max_length=1000)]
Epoch = Annotated[int, Meta(ge=0, le=2**31)]
Meter = tuple[
    int,
    Word,
    Literal["AverageMeter", "SumMeter", "TimeMeter", "StopwatchMeter"],
    dict[str, Any],
]
_OF_METERS = {
    "AverageMeter": ("val", "sum", "count"),
    "SumMeter": ("sum",),
    "TimeMeter": ("init", "n"),
    "StopwatchMeter": ("sum", "n"),
}


class Position(Struct):
    """Where the data loader was."""

    epoch: Epoch
    iterations_in_epoch: Count = 0
    shuffle: bool = True
    version: Literal[1, 2] = 1


class TokenCount(Struct):
    """What the tasks count."""

    train_tokens: Count


class ExtraState(Struct):
    """How far training was. Meters are made of their class's name, which is therefore one of a few."""

    train_iterator: Optional[Position] = None
    metrics: Optional[dict[str, list[Meter]]] = None
    previous_training_time: Any = 0  # of several processes a tensor; `_check_tensor` has seen what it holds
    val_loss: Optional[float] = None
    best: Optional[float] = None
    counted: Optional[TokenCount] = msgspec.field(default=None, name=TASK_STATE)
    counted_images: Optional[TokenCount] = msgspec.field(default=None, name=IMAGE_TASK_STATE)


class History(Struct):
    """What was trained with, and how many updates; the optimizer's state stands elsewhere."""

    num_updates: Count
    criterion_name: Word
    optimizer_name: Word
    lr_scheduler_state: dict[str, Any]
    optimizer: None = None


class ParameterGroup(Struct):
    """Options of the optimizer for some parameters, and their numbers."""

    params: list[Count]


class OptimizerState(Struct):
    """What an optimizer of torch remembers of each parameter, by its number."""

    param_groups: Annotated[list[ParameterGroup], Meta(min_length=1)]
    state: dict[int, dict[str, Any]]


class Contents(Struct):
    """A checkpoint, as far as the commands use it beside ``cfg`` and ``model``."""

    args: None = None
    criterion: Optional[dict[str, Any]] = None
    optimizer_history: Optional[Annotated[list[History], Meta(min_length=1)]] = None
    last_optimizer_state: Optional[OptimizerState] = None
    task_state: Optional[dict[str, Any]] = None
    extra_state: Optional[ExtraState] = None


def check_contents(checkpoint: Mapping[str, Any], size: int) -> None:
    """Check everything but whether the weights are those of the model that ``cfg`` describes.

    Args:
        checkpoint: what was loaded, a dictionary with ``cfg`` and ``model``.
        size: of its file, in bytes.

    Raises:
        UnfitCheckpoint: says what is not as it should be.
    """
    if checkpoint.get("args") is not None:
        raise UnfitCheckpoint("options under 'args', as checkpoints of 2020 and before have them, are not read here")
    for name, part in checkpoint.items():
        _check_plain(str(name), part)
    _check_config(checkpoint["cfg"])
    try:
        msgspec.convert(checkpoint, Contents)
    except (msgspec.ValidationError, AttributeError, TypeError) as error:  # the latter: a tensor for a dictionary
        raise UnfitCheckpoint(f"damaged or altered: {str(error).replace('`', '')}") from error
    for meters in ((checkpoint.get("extra_state") or {}).get("metrics") or {}).values():
        for _, name, kind, state in meters:
            _check_meter(name, _OF_METERS[kind], state)
    check_weights(checkpoint["model"], size)


def check_finite(checkpoint: Mapping[str, Any]) -> None:
    """Refuse weights, and what the optimizer remembers of them, that are infinite or no numbers."""
    moments = (checkpoint.get("last_optimizer_state") or {}).get("state", {}).items()
    remembered = [(f"the optimizer's {name}", value) for _, entry in moments for name, value in entry.items()]
    for name, tensor in remembered:
        if isinstance(tensor, Tensor) and tensor.dtype not in FLOATS:  # torch would turn them into some
            raise UnfitCheckpoint(f"damaged or altered: {name} is {tensor.dtype}, floating-point numbers are needed")
    averages = [entry.get("average") for entry in (checkpoint.get("extra_state") or {}).values() if type(entry) is dict]
    averaged = [
        (f"the average of {name}", value) for each in averages if type(each) is dict for name, value in each.items()
    ]
    for name, tensor in [*checkpoint["model"].items(), *remembered, *averaged]:
        if isinstance(tensor, Tensor) and not _is_finite(tensor):
            raise UnfitCheckpoint(
                f"{name} has values that are infinite or no numbers: the training diverged, or it is damaged"
            )


def _check_meter(name: str, needed: Iterable[str], state: Mapping[str, Any]) -> None:
    """Refuse the state of a meter that has not the numbers of its kind; sums are numbers or tensors of one number."""
    for part in (*needed, "round"):
        value = state.get(part)
        is_tensor = isinstance(value, Tensor) and value.dim() == 0 and part not in ("count", "round")
        kinds = (int, type(None)) if part == "round" else (int, float)
        is_unset = part == "val" and value is None and part in state
        if not (is_tensor or is_unset or isinstance(value, kinds)):
            raise UnfitCheckpoint(f"damaged or altered: {part} of the meter {name} is no number")


def _is_finite(tensor: Tensor) -> bool:
    """Sums are ten times as fast as a look at each value; one that is not finite may also be an overflow."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _check_plain(part: str, content: Any) -> None:
    """Refuse whatever is neither plain data nor a tensor. Everything is looked at once, however often it is named."""
    pending, seen = [content], set()
    while pending:
        value = pending.pop()
        kind = type(value)
        if kind is int and value.bit_length() > 64:
            raise UnfitCheckpoint(f"damaged or altered: {part} has a number of {value.bit_length()} bits in it")
        if kind in SCALARS or id(value) in seen:
            continue
        seen.add(id(value))
        if kind in (Tensor, nn.Parameter):
            _check_tensor(part, value)
        elif kind in (list, tuple):
            pending += value
        elif kind in (dict, OrderedDict, Namespace):
            items = vars(value) if kind is Namespace else value
            if not all(type(name) in (str, int) for name in items):
                raise UnfitCheckpoint(f"damaged or altered: {part} has keys that are no text")
            pending += items
            pending += items.values()
        else:
            raise UnfitCheckpoint(f"{part} holds a {kind.__name__}; weights and plain data alone are read")


def _check_tensor(part: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or vars(tensor):
        raise UnfitCheckpoint(f"{part} holds a tensor that is sparse, quantized, without content or otherwise special")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise UnfitCheckpoint(
            f"{part} announces a tensor of {tuple(tensor.shape)}, of which the file holds a part only"
        )


def _check_config(config: Any) -> None:
    """Refuse what OmegaConf would replace by something else, and what is too large or nested too deep for it."""
    pending: list[tuple[Any, int]] = [(config, 0)]
    num_values = 0
    while pending:
        value, depth = pending.pop()
        num_values += 1
        if depth > MAX_DEPTH or num_values > MAX_VALUES:
            raise UnfitCheckpoint("damaged or altered: cfg is nested too deep, or has too many values")
        if isinstance(value, str):
            if "${" in value or value == "???":
                raise UnfitCheckpoint(f"cfg has {value[:60]!r} in it, which is not looked up for a file's sake")
        elif isinstance(value, Tensor):
            raise UnfitCheckpoint("damaged or altered: cfg has a tensor in it")
        else:
            pending += ((each, depth + 1) for each in _inside(value))


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, (list, tuple)) else ()


def check_weights(weights: Any, size: int) -> None:
    """Raise UnfitCheckpoint unless weights are tensors of floating-point numbers, of a file of so many bytes."""
    if not isinstance(weights, dict) or not all(type(name) is str for name in weights):
        raise UnfitCheckpoint("damaged, its model is no dictionary of weights")
    total = 0
    for name, tensor in weights.items():
        if not isinstance(tensor, Tensor):
            raise UnfitCheckpoint(f"damaged, {name} is a {type(tensor).__name__} where a tensor is needed")
        if tensor.dtype not in FLOATS:
            raise UnfitCheckpoint(f"damaged or altered: {name} is {tensor.dtype}, a weight is a floating-point number")
        total += tensor.numel() * tensor.element_size()
    if total > _MAX_SHARED * size + _SMALL:
        raise UnfitCheckpoint(f"its weights are {total:,} bytes, {size:,} bytes are in the file")


LARGEST_PICKLE = 1 << 26
"""Bytes of everything but tensors; 500 steps of growth take a tenth. Python reads about 10 MB of it in a second."""
_NUM_READINGS = 10  # of a file that others replace meanwhile
_MORE_THAN_DATA = "damaged, or it holds more than weights and plain data"


def load_archive(path: Path, mmap: bool) -> Any:
    """Load what torch has saved on the CPU, without executing anything that a pickle could contain.

    Args:
        path: a regular file.
        mmap: leave tensors on disk until they are used.

    Raises:
        UnfitCheckpoint: it is truncated or damaged, or holds other things than tensors and plain data.
    """
    # torch opens the file twice, for what the pickle says and for the tensors. Meanwhile another process may put one in
    # its place, as a run does that takes the optimizer's state out of the checkpoints of a stage that is complete.
    for _ in range(_NUM_READINGS):
        before = file_identity(path)
        try:
            loaded = _load_archive(path, mmap)
        except UnfitCheckpoint:
            if file_identity(path) == before:
                raise
        else:
            if file_identity(path) == before:
                return loaded
    raise UnfitCheckpoint("is replaced again and again while it is being read")


def _load_archive(path: Path, mmap: bool) -> Any:
    if not VERIFIED.has(path):
        _check_archive(path)
    # fairseq keeps the options of AdaDelta and SGD in its checkpoints as a Namespace. Here, each time, because torch
    # forgets it for all where somebody allows it for a while.
    torch.serialization.add_safe_globals([Namespace])
    try:
        # Mapped in any case, as sizes that a pickle announces then end with the file.
        where: Any = "cpu" if mmap else _copied
        return torch.load(path, map_location=where, weights_only=True, mmap=True)
    except OSError:
        raise
    except pickle.UnpicklingError as error:  # torch's own text advises to run whatever the file holds
        raise UnfitCheckpoint(f"cannot be loaded as a checkpoint ({_MORE_THAN_DATA})") from error
    except Exception as error:  # of many kinds, as a damaged pickle calls what it likes of torch's few functions
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        reason = _MORE_THAN_DATA if "weights" in reason.lower() and "only" in reason else reason
        raise UnfitCheckpoint(f"cannot be loaded as a checkpoint ({reason})") from error


def _copied(storage: UntypedStorage, location: str) -> UntypedStorage:
    return storage.clone()


def _check_archive(path: Path) -> None:
    """Compare every file of the archive with its checksum."""
    size = os.path.getsize(path)
    if not zipfile.is_zipfile(path):
        raise UnfitCheckpoint(f"no checkpoint, or a truncated one ({size:,} bytes, not a zip archive)")
    try:
        with zipfile.ZipFile(path) as archive:
            _check_directory(archive.infolist(), size)
            damaged = archive.testzip()
    except Exception as error:  # of many kinds: BadZipFile, NotImplementedError, RuntimeError, struct.error, …
        if isinstance(error, UnfitCheckpoint) or (isinstance(error, OSError) and error.errno != errno.EINVAL):
            raise  # EINVAL: a place before the file's beginning
        raise UnfitCheckpoint(f"damaged or truncated, its directory cannot be read ({error})") from error
    if damaged is not None:
        raise UnfitCheckpoint(f"damaged, {damaged!r} in it does not have the checksum that was written with it")


def _check_directory(entries: list[zipfile.ZipInfo], size: int) -> None:
    """Refuse what torch does not write, and what is larger than it says."""
    if len({entry.filename for entry in entries}) < len(entries):
        raise UnfitCheckpoint("damaged, its directory names a file twice")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise UnfitCheckpoint(f"no checkpoint, {entry.filename!r} in it is compressed")
        if entry.filename.endswith("data.pkl") and entry.file_size > LARGEST_PICKLE:
            raise UnfitCheckpoint(
                f"{entry.file_size:,} bytes beside its tensors, more than the {LARGEST_PICKLE:,} that can be read"
            )
    if sum(entry.file_size for entry in entries) > size:
        raise UnfitCheckpoint("damaged, the files in it overlap")


Checkpoint = dict[str, Any]

DICTIONARY_KEY = "alma_dictionary_sha256"
"""Key in a checkpoint's ``task_state``: identifies the vocabulary that the model was trained with."""

_REMEDY = "give a checkpoint that fairseq-train or alma-grow wrote"


def read_checkpoint(
    path: Union[str, Path], mmap: bool = True, remedy: str = _REMEDY, needed: Collection[str] = ()
) -> Checkpoint:
    """Load a checkpoint on the CPU, without executing anything that a pickle could contain.

    Its checksums and its weights are looked at once for each file and process.

    Args:
        path: the file.
        mmap: leave tensors on disk until they are used; then they take memory only once they are.
        remedy: what to do if it cannot be read, for messages.
        needed: further keys that it must have.

    Returns:
        The dictionary that fairseq saved: ``cfg``, ``model``, ``extra_state`` and so on.

    Raises:
        AlmaError: if the file is missing, truncated, damaged, altered, or no checkpoint of a model that is built here.
    """
    path = Path(path)
    if not path.is_file():
        raise AlmaError(f"{path}: no such checkpoint file; {remedy}")
    try:
        checkpoint = load_archive(path, mmap)
        if not isinstance(checkpoint, dict) or "model" not in checkpoint or not _has_config(checkpoint):
            raise UnfitCheckpoint("no checkpoint of fairseq, it lacks 'model' or 'cfg'")
        check_contents(checkpoint, path.stat().st_size)
        check_model(checkpoint["cfg"]["model"], checkpoint["model"])
        if lacking := [name for name in needed if checkpoint.get(name) is None]:
            raise UnfitCheckpoint(f"no checkpoint that fairseq-train wrote, it lacks {', '.join(lacking)}")
        if not VERIFIED.has(path):
            check_finite(checkpoint)
            VERIFIED.add(path)
    except UnfitCheckpoint as error:
        raise AlmaError(f"{path}: {error}; {remedy}") from error
    return checkpoint


def _has_config(checkpoint: Mapping[str, Any]) -> bool:
    return isinstance(checkpoint.get("cfg"), dict) and isinstance(checkpoint["cfg"].get("model"), dict)


def untrained_checkpoint(cfg: Any, model: Mapping[str, Any], task_state: Mapping[str, Any]) -> Checkpoint:
    """Return a checkpoint of weights that no training of fairseq made, with what fairseq expects of every one."""
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


def write_checkpoint(checkpoint: Checkpoint, path: Union[str, Path], replace: bool = True) -> None:
    """Save a checkpoint so that it appears under its name only when it is complete.

    Args:
        checkpoint: what `read_checkpoint` returns.
        path: the file.
        replace: whether one that exists is replaced, or refused.
    """
    with open_atomically(Path(path), replace=replace) as file:
        torch.save(checkpoint, file)


def find_average(checkpoint: Checkpoint) -> Optional[dict[str, Any]]:
    """Return the part of ``extra_state`` that has an average; None: there is none."""
    entries = (checkpoint.get("extra_state", {}).get(key) for key in (TASK_STATE, IMAGE_TASK_STATE))
    return next((each for each in entries if isinstance(each, dict) and isinstance(each.get(AVERAGE), dict)), None)


def with_shared_names(model: Mapping[str, Tensor], average: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the average under all names of ``model``; what was not averaged, as buffers, is the model's own."""
    by_place = {_place(model[name]): tensor for name, tensor in average.items() if name in model}
    return {name: average.get(name, by_place.get(_place(tensor), tensor)) for name, tensor in model.items()}


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


_STEP = "step"
_MOMENTS = {  # by the names of torch's and fairseq's classes: what an update looks up, in the parameter's shape
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adadelta": ("square_avg", "acc_delta"),
    "Adagrad": ("sum",),
    "Adamax": ("exp_avg", "exp_inf"),
    "SGD": (),
    "NAG": (),
}
_WITHOUT_STEP = ("SGD", "NAG")
_IN_NO_GROUP = "differentiable"  # torch adds it to the defaults alone


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Check what an optimizer has just loaded; of kinds that are not listed here, whose moments have any shape, less.

    Raises:
        UnfitCheckpoint: its options, or what it remembers of a parameter, are others than those of this optimizer.
    """
    kind = next((each.__name__ for each in type(optimizer).__mro__ if each.__name__ in _MOMENTS), None)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for group in optimizer.param_groups:
        _check_options(group, optimizer.defaults)
    if optimizer.state.keys() - {*parameters}:
        raise UnfitCheckpoint(f"the optimizer in it has other parameters than the {len(parameters)} of its model")
    for number, parameter in enumerate(parameters):
        entry = optimizer.state.get(parameter, {})
        if not isinstance(entry, dict):
            raise UnfitCheckpoint(f"the optimizer in it has no moments of parameter {number}")
        if kind is not None and entry:
            _check_entry(kind, number, parameter, entry)


def _check_options(found: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for name, own in known.items():
        if name not in found:
            if name == _IN_NO_GROUP:
                continue
            raise UnfitCheckpoint(f"the optimizer in it lacks the option {name}")
        if not _is_alike(found[name], own):
            raise UnfitCheckpoint(
                f"the optimizer in it has {repr(found[name])[:60]} as {name}, such as {own!r} is needed"
            )


def _is_alike(found: Any, own: Any) -> bool:
    """Tell whether an option has the kind of the command's own: switches are the same, numbers are finite."""
    if own is None or isinstance(own, bool):
        return found is own
    if isinstance(own, (list, tuple)):
        is_list = isinstance(found, (list, tuple)) and len(found) == len(own)
        return is_list and all(_is_alike(*pair) for pair in zip(found, own, strict=True))
    return _is_number(found) if _is_number(own) else type(found) is type(own)


def _check_entry(kind: str, number: int, parameter: Tensor, entry: Mapping[str, Any]) -> None:
    needed = _MOMENTS[kind] if kind in _WITHOUT_STEP else (_STEP, *_MOMENTS[kind])
    if lacking := [name for name in needed if entry.get(name) is None]:
        raise UnfitCheckpoint(f"the optimizer in it lacks {', '.join(lacking)} of parameter {number}")
    for name, value in entry.items():
        if name == _STEP:
            steps = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
            fits = _is_number(steps) and steps >= 0
        else:
            fits = value is None or (isinstance(value, Tensor) and value.shape == parameter.shape)
        if not fits:
            shape = tuple(value.shape) if isinstance(value, Tensor) else repr(value)[:60]
            fitting = "a number of at least 0" if name == _STEP else tuple(parameter.shape)
            raise UnfitCheckpoint(f"the optimizer's {name} of parameter {number} is {shape}, {fitting} is needed")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
