"""The optimizer's state in a checkpoint of fairseq, through a growth step.

fairseq numbers parameters in the order of ``model.parameters()``. With ``--fp16`` or ``--bf16`` it keeps one flat fp32
vector for all of them (unless ``--fp16-no-flatten-grads``), and its optimizer sees that vector as a single parameter.
"""

from typing import Any, Callable, Mapping, Sequence

import torch
from torch import Size, Tensor

from fairseq_alma.errors import AlmaError

GrowState = Callable[[str, Tensor], Tensor]
"""Takes a parameter's name and one of its moments, in the parameter's shape, and returns the grown moment."""


def grow_optimizer_state(state: Mapping[str, Any], shapes: Mapping[str, Size], grow: GrowState) -> dict[str, Any]:
    """Grow the moments of every parameter.

    Args:
        state: ``last_optimizer_state`` of the checkpoint.
        shapes: names and shapes of the old model's parameters, in its order.
        grow: grows one moment.

    Returns:
        The same structure for the grown model, whose parameters have the same order.

    Raises:
        AlmaError: if the state belongs to other parameters.
    """
    entries = state.get("state", {})
    if len(entries) == len(shapes):
        names: Sequence[Sequence[str]] = [[name] for name in shapes]
    elif len(entries) == 1:
        names = [list(shapes)]
    else:
        raise AlmaError(
            f"--optimizer copy: the checkpoint's optimizer has {len(entries)} parameters, its model {len(shapes)}; "
            "use --optimizer reset"
        )
    grown = {
        key: {field: _grow_field(value, names[index], shapes, grow) for field, value in entry.items()}
        for index, (key, entry) in enumerate(sorted(entries.items()))
    }
    return {**state, "state": grown}


def _grow_field(value: Any, names: Sequence[str], shapes: Mapping[str, Size], grow: GrowState) -> Any:
    """Grow one field of one entry; the number of steps, for instance, is no moment and stays."""
    if not torch.is_tensor(value) or value.dim() == 0:
        return value
    numels = [shapes[name].numel() for name in names]
    if value.numel() != sum(numels):
        raise AlmaError(
            f"--optimizer copy: a moment of {value.numel()} values found for parameters of {sum(numels)}; "
            "use --optimizer reset"
        )
    moments = [
        grow(name, part.view(shapes[name])) for name, part in zip(names, value.flatten().split(numels), strict=True)
    ]
    return moments[0] if len(names) == 1 else torch.cat([moment.flatten() for moment in moments])
