"""What may stand in a checkpoint: plain data of bounded size, and tensors that are what they say. No fairseq.

What the commands use is declared as a type and held against it; further keys that fairseq writes are plain data.
"""

from argparse import Namespace
from collections import OrderedDict
from typing import Annotated, Any, Iterable, Literal, Mapping, Optional

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor, nn

from fairseq_alma.checkpoints import IMAGE_TASK_STATE, TASK_STATE, UnfitCheckpoint
from fairseq_alma.files import Count

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
