"""Files of safetensors, and the tensors that a folder of Qwen3 or Qwen3-MoE has."""

import errno
import stat
from pathlib import Path
from typing import Any, Mapping, Sequence

from torch import Tensor

from fairseq_alma.checkpoints.architecture import other_shapes
from fairseq_alma.checkpoints.checkpoint_file import FLOATS
from fairseq_alma.errors import AlmaError

WEIGHTS = "model.safetensors"


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors straight from where they are, also from a checkpoint that is mapped into memory.

    Raises:
        AlmaError: the package safetensors is not installed.
        OSError: it cannot be written.
    """
    save_file = _library().save_file
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)  # of any new file; the library's own is for its user alone
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
        path.chmod(mode)
    except OSError:
        raise
    except Exception as error:  # SafetensorError has the system's error only as text
        full = "No space left" in str(error) or "os error 28" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file of tensors on the CPU, all of them floating-point numbers.

    Raises:
        AlmaError: it is missing or damaged, or the package safetensors is not installed.
    """
    refuse_special(path)
    load_file = _library().load_file
    try:
        tensors = load_file(path)
    except Exception as error:
        reason = str(error).partition("\n")[0][:200]
        raise AlmaError(f"{path}: no file of safetensors, or damaged ({reason}); give another folder") from error
    if wrong := [name for name, tensor in tensors.items() if tensor.dtype not in FLOATS]:
        raise AlmaError(f"{path}: {wrong[0][:100]} is {tensors[wrong[0]].dtype}, a weight is a floating-point number")
    return tensors


def refuse_special(path: Path) -> None:
    """Raise AlmaError unless a path is a regular file: reading a pipe would not end."""
    if not path.is_file():
        raise AlmaError(f"{path}: no such file; give a folder that transformers has written (save_pretrained)")


def differing_shapes(
    tensors: Mapping[str, Tensor], options: Mapping[str, Any], num_tokens: int, mixtures: Sequence[bool]
) -> str:
    """Describe how names and shapes of a folder's tensors differ from those of its model; empty if they do not.

    Args:
        tensors: of the folder.
        options: ``cfg.model`` of the same model as an ``alma_transformer_lm``.
        num_tokens: rows of its embeddings.
        mixtures: for each layer, whether it has experts.
    """
    if sum(mixtures) * options["num_experts"] + len(mixtures) > len(tensors):  # before as many names are made
        return f"it has {len(tensors):,} weights for {len(mixtures):,} layers, {options['num_experts']:,} experts"
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return other_shapes(found, _folder_shapes(options, num_tokens, mixtures))


def _folder_shapes(options: Mapping[str, Any], num_tokens: int, mixtures: Sequence[bool]) -> dict[str, tuple[int, ...]]:
    dim, ffn, head_dim = (options[name] for name in ("decoder_embed_dim", "decoder_ffn_embed_dim", "head_dim"))
    queries, keys = (options[name] * head_dim for name in ("decoder_attention_heads", "num_kv_heads"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (num_tokens, dim), "model.norm.weight": (dim,)}
    if not (options["share_decoder_input_output_embed"] and options["no_embedding_norm"]):
        shapes["lm_head.weight"] = (num_tokens, dim)
    for layer, has_mixture in enumerate(mixtures):
        here = f"model.layers.{layer}."
        shapes |= {f"{here}{norm}_layernorm.weight": (dim,) for norm in ("input", "post_attention")}
        shapes |= {f"{here}self_attn.{norm}_norm.weight": (head_dim,) for norm in ("q", "k")}
        shapes |= {f"{here}self_attn.q_proj.weight": (queries, dim), f"{here}self_attn.o_proj.weight": (dim, queries)}
        shapes |= {f"{here}self_attn.{name}_proj.weight": (keys, dim) for name in ("k", "v")}
        experts = [""]
        if has_mixture:
            experts = [f"experts.{expert}." for expert in range(options["num_experts"])]
            shapes[f"{here}mlp.gate.weight"] = (len(experts), dim)
        for expert in experts:
            shapes |= {f"{here}mlp.{expert}{name}_proj.weight": (ffn, dim) for name in ("gate", "up")}
            shapes[f"{here}mlp.{expert}down_proj.weight"] = (dim, ffn)
    return shapes


def _library() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise AlmaError("safetensors is not installed; pip install 'fairseq-alma[export]'") from error
    return safetensors.torch
