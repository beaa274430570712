"""What an exported folder has to be before a model is built of it: whole, of the declared types, weights that fit.

``alma-export`` writes the sha256 of every file (``sha256sum -c SHA256SUMS`` compares them too). What reaches
transformers are the declared options of `FolderConfig` alone: nothing that names code, and no size that the weights do
not have. Weights are held against the shapes that checkpoints have, by the same comparison.
"""

import errno
import re
import stat
from pathlib import Path
from typing import Annotated, Any, Literal, Mapping, Optional

import msgspec
from msgspec import Meta, Struct
from torch import Tensor

from fairseq_alma.checkpoints import UnfitCheckpoint
from fairseq_alma.checkpoints.architecture import (
    Factor,
    NumLayers,
    Share,
    Size,
    SwitchOptions,
    other_shapes,
    switch_shapes,
)
from fairseq_alma.checkpoints.checkpoint_file import check_finite, check_weights
from fairseq_alma.errors import AlmaError
from fairseq_alma.exchange.member_weights import folder_name
from fairseq_alma.files import read_json_object
from fairseq_alma.growth.gate_tree import Choice, GateTree

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
SUMS = "SHA256SUMS"
AUTO_MAP = {"AutoConfig": "modeling_alma.AlmaConfig", "AutoModelForCausalLM": "modeling_alma.AlmaForCausalLM"}
_OWN_WORDS = ("README.md",)  # a model card is there to be edited
_SAVED_AGAIN = "transformers_version"  # transformers writes it into each config.json that it saves
_MOST_SUMS = 1 << 16  # bytes
_REMEDY = "give a folder that alma-export wrote"

Row = Annotated[int, Meta(ge=0, le=2**24)]


class Gate(Struct):
    """The gate of a layer, see `modeling_alma.AlmaGate`."""

    num_experts: Size
    choices: Optional[Annotated[list[tuple[Row, Row, Optional[Row]]], Meta(min_length=1)]] = None
    row_expert: Optional[list[Optional[Row]]] = None

    def tree(self) -> GateTree:
        """Return its choices. Raises UnfitCheckpoint if they are no tree of its experts."""
        if self.choices is None or self.row_expert is None:
            return GateTree.flat(self.num_experts)
        starts, stops, parents = zip(*self.choices, strict=True)
        inner = [row for row, expert in enumerate(self.row_expert) if expert is None]
        leaves = sorted(expert for expert in self.row_expert if expert is not None)
        if (
            starts != (0, *stops[:-1])
            or stops[-1] != len(self.row_expert)
            or parents[0] is not None
            or None in parents[1:]
            or sorted(parents[1:]) != inner
            or any(parent >= start for start, parent in zip(starts[1:], parents[1:], strict=True))
            or leaves != list(range(self.num_experts))
        ):
            raise UnfitCheckpoint(f"the choices of a gate are no tree of its {self.num_experts:,} experts")
        return GateTree(tuple(Choice(*choice) for choice in self.choices), tuple(self.row_expert))


class MemberSizes(Struct):
    """A single model, see `modeling_alma.AlmaMember`."""

    hidden_size: Size
    intermediate_size: Size
    num_layers: NumLayers
    num_heads: Size
    activation: Literal["relu", "gelu", "gelu_tanh", "tanh", "linear"]
    positions: Literal["learned", "sinusoidal"]
    max_positions: Size
    scale_embedding: bool
    dropout: Share
    attention_dropout: Share
    activation_dropout: Share
    capacity_factor: Factor
    eval_capacity_factor: Factor
    gates: Annotated[list[Optional[Gate]], Meta(max_length=10_000)]

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or len(self.gates) != self.num_layers:
            raise ValueError(
                f"{self.num_heads} heads for {self.hidden_size} dimensions, {len(self.gates)} gates for "
                f"{self.num_layers} layers"
            )

    def shapes(self, weights: Mapping[str, Tensor], prefix: str, vocab_size: int) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of its weights. Raises UnfitCheckpoint if no weight is as large as it announces."""
        layers = {layer: gate for layer, gate in enumerate(self.gates) if gate is not None}
        for layer, gate in layers.items():
            stack = weights.get(f"{prefix}layers.{layer}.switch.experts.fc1_bias")
            if stack is None or stack.dim() != 2 or len(stack) != gate.num_experts:
                found = "none" if stack is None else f"{tuple(stack.shape)}"
                raise UnfitCheckpoint(f"num_experts {gate.num_experts:,} in layer {layer}, its weights have {found}")
        if self.num_layers > len(weights):
            raise UnfitCheckpoint(f"num_layers {self.num_layers:,}, and {len(weights):,} weights")
        options = SwitchOptions(
            decoder_embed_dim=self.hidden_size,
            decoder_ffn_embed_dim=self.intermediate_size,
            decoder_layers=self.num_layers,
            decoder_attention_heads=self.num_heads,
            decoder_sinusoidal_pos=self.positions == "sinusoidal",
            tokens_per_sample=self.max_positions,
            num_experts=1,  # each gate has its own number
        )
        shapes = switch_shapes(options, vocab_size, {layer: gate.tree() for layer, gate in layers.items()})
        named = ((folder_name(name), shape) for name, shape in shapes.items())
        return {f"{prefix}{name}": shape for name, shape in named if name is not None}


class Combined(Struct):
    """Members whose logits are averaged."""

    members: Annotated[list[Row], Meta(min_length=1)]
    weight: Annotated[float, Meta(gt=0, le=1)]


class FolderConfig(Struct, kw_only=True):
    """``config.json`` of a language model, see `modeling_alma.AlmaConfig`: all of it that reaches transformers."""

    vocab_size: Size
    max_position_embeddings: Size
    pad_token_id: Row
    bos_token_id: Row
    eos_token_id: Row
    groups: Annotated[list[Combined], Meta(min_length=1)]
    members: Annotated[list[MemberSizes], Meta(min_length=1, max_length=10_000)]
    router_aux_loss_coef: Factor = 0.01
    output_router_logits: bool = False
    dtype: Optional[Literal["float32", "float16", "bfloat16", "float64"]] = None
    attn_implementation: Optional[Literal["eager", "sdpa"]] = None
    auto_map: Optional[dict[str, str]] = None

    def __post_init__(self) -> None:
        used = sorted(member for group in self.groups for member in group.members)
        total = sum(group.weight for group in self.groups)
        if used != list(range(len(self.members))) or not abs(total - 1) < 1e-3:
            raise ValueError(f"groups of {len(self.members)} members that have each once, weights that add up to 1")
        if max(self.pad_token_id, self.bos_token_id, self.eos_token_id) >= self.vocab_size:
            raise ValueError(f"a token beyond the vocabulary of {self.vocab_size:,}")
        if self.max_position_embeddings > min(member.max_positions for member in self.members):
            raise ValueError(f"max_position_embeddings {self.max_position_embeddings:,}, and a member takes fewer")
        if self.auto_map is not None and self.auto_map != AUTO_MAP:
            raise ValueError("auto_map names other code than this folder's")

    def options(self) -> dict[str, Any]:
        """Return what `modeling_alma.AlmaConfig` takes."""
        content = msgspec.to_builtins(self)
        return {name: value for name, value in content.items() if name not in _FOR_OTHERS and value is not None}


_FOR_OTHERS = ("dtype", "attn_implementation", "auto_map")  # to others than the commands here


def read_config(folder: Path) -> FolderConfig:
    """Read ``config.json`` of a language model.

    Raises:
        AlmaError: it is none, or has options that make no model.
    """
    refuse_special(folder / CONFIG)
    if not (folder / CONFIG).is_file():
        raise AlmaError(f"{folder}: there is no {CONFIG} in it; {_REMEDY}, or a checkpoint")
    content = read_json_object(folder / CONFIG, _REMEDY)
    if content.get("model_type") != "alma_lm":
        raise AlmaError(f"{folder}: model_type {content.get('model_type')!r:.60} found; {_REMEDY}")
    try:
        return msgspec.convert(content, FolderConfig)
    except msgspec.ValidationError as error:
        raise misfit(folder, str(error).replace("`", "")) from error


def misfit(folder: Path, reason: str) -> AlmaError:
    """Return the error that a folder's configuration makes no model of its weights."""
    return AlmaError(f"{folder}: config.json and weights do not go together ({reason:.300}); export it again")


def read_weights(folder: Path, config: FolderConfig) -> dict[str, Tensor]:
    """Read the weights of a language model: finite numbers, in the shapes that its configuration says."""
    weights = read_tensors(folder / WEIGHTS)
    try:
        needed: dict[str, tuple[int, ...]] = {}
        for number, member in enumerate(config.members):
            needed |= member.shapes(weights, f"members.{number}.", config.vocab_size)
        if differing := other_shapes({name: tuple(tensor.shape) for name, tensor in weights.items()}, needed):
            raise UnfitCheckpoint(differing)
    except UnfitCheckpoint as error:
        raise misfit(folder, str(error)) from error
    return weights


def refuse_special(path: Path) -> None:
    """Raise AlmaError if a pipe, a device or a folder stands where a file is to be read."""
    if path.exists() and not path.is_file():
        raise AlmaError(f"{path}: a pipe, a device or a folder, no file; {_REMEDY}")


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
    except Exception as error:  # SafetensorError, whose text alone says what the system said
        full = "No space left" in str(error) or "os error 28" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(path)) from error


def read_tensors(path: Path, leave_out: Optional[re.Pattern] = None) -> dict[str, Tensor]:
    """Read a file of tensors on the CPU, all of them finite floating-point numbers.

    Args:
        path: the file.
        leave_out: names of tensors that are not wanted, whatever they are.

    Raises:
        AlmaError: it is missing or damaged, or the package safetensors is not installed.
    """
    refuse_special(path)
    load_file = _library().load_file
    try:
        tensors = {
            name: tensor
            for name, tensor in load_file(path).items()
            if leave_out is None or not leave_out.fullmatch(name)
        }
    except Exception as error:
        reason = str(error).partition("\n")[0][:200]
        raise AlmaError(f"{path}: no file of safetensors, or damaged ({reason}); give another folder") from error
    try:
        check_weights(tensors, path.stat().st_size)
        check_finite({"model": tensors})
    except UnfitCheckpoint as error:
        raise AlmaError(f"{path}: {error}; give another folder") from error
    return tensors


def _library():
    try:
        import safetensors.torch
    except ImportError as error:
        raise AlmaError(
            "safetensors is not installed, and this needs it; pip install 'fairseq-alma[export]'"
        ) from error
    return safetensors.torch
