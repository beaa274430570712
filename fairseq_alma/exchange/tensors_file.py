"""Weights in the safetensors format, which holds numbers and names and no code."""

import errno
from pathlib import Path
from typing import Mapping

from torch import Tensor

from fairseq_alma.errors import AlmaError


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors straight from where they are, also from a checkpoint that is mapped into memory.

    Raises:
        AlmaError: the package safetensors is not installed.
        OSError: it cannot be written.
    """
    save_file = _library().save_file
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    except OSError:
        raise
    except Exception as error:  # SafetensorError, whose text alone says what the system said
        full = "No space left" in str(error) or "os error 28" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file of tensors on the CPU.

    Raises:
        AlmaError: it is missing or damaged, or the package safetensors is not installed.
    """
    load_file = _library().load_file
    try:
        return load_file(path)
    except Exception as error:
        reason = str(error).partition("\n")[0][:200]
        raise AlmaError(f"{path}: no file of safetensors, or damaged ({reason}); give another folder") from error


def _library():
    try:
        import safetensors.torch
    except ImportError as error:
        raise AlmaError(
            "safetensors is not installed, and this needs it; pip install 'fairseq-alma[export]'"
        ) from error
    return safetensors.torch
