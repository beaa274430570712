"""``alma-import``: a GPT-2-like folder of transformers becomes a checkpoint of ``alma_switch_lm``. No fairseq.

Only ``config.json``, ``tokenizer.json`` and ``model.safetensors``, or the files of its index, are read; no code of the
folder is run. Feed-forward networks of every n-th layer become the one expert of a Switch layer, whose gate always
gives it the weight 1: the model computes the same, and can grow.

fairseq's four symbols come before the folder's tokens, and take the row of its end-of-text token. So that token counts
five times in every softmax; relative to each other, all other tokens keep their probabilities.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Optional, Sequence

import torch
from msgspec import Meta, Struct
from torch import Tensor

from fairseq_alma.checkpoints import UnfitCheckpoint
from fairseq_alma.checkpoints.architecture import EXTRA_POSITIONS, Size, check_model
from fairseq_alma.checkpoints.checkpoint_file import DICTIONARY_KEY, Checkpoint, untrained_checkpoint
from fairseq_alma.checkpoints.model_options import one_expert_options
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import NUM_FAIRSEQ_SYMBOLS, StreamTokenizer
from fairseq_alma.errors import AlmaError
from fairseq_alma.exchange.exported_folder import read_tensors, refuse_special
from fairseq_alma.files import Name, as_record, read_json_object
from fairseq_alma.growth.gate_tree import has_experts

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
INDEX = "model.safetensors.index.json"
"""Of weights in several files: ``weight_map`` says which tensor stands in which."""
ACTIVATIONS = {"gelu_new": "gelu_accurate", "gelu_pytorch_tanh": "gelu_accurate", "gelu": "gelu", "relu": "relu"}
_MASK = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")  # the causal mask, which older files have
_REMEDY = "give a folder with a model of type gpt2"
Share = Annotated[float, Meta(ge=0, le=1)]


class GPT2(Struct, kw_only=True):
    """``config.json`` of a GPT-2 model, as far as it is used; defaults as transformers has them."""

    model_type: str
    vocab_size: Size = 50257
    n_positions: Size = 1024
    n_embd: Size = 768
    n_layer: Annotated[int, Meta(ge=1, le=10_000)] = 12
    n_head: Size = 12
    n_inner: Optional[Size] = None
    activation_function: str = "gelu_new"
    resid_pdrop: Share = 0.1
    attn_pdrop: Share = 0.1
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True
    eos_token_id: Any = 50256


class WeightIndex(Struct):
    """``model.safetensors.index.json``."""

    weight_map: Annotated[dict[str, Name], Meta(min_length=1, max_length=1_000_000)]


def import_folder(folder: Path, stream: Optional[Stream], every: int) -> Checkpoint:
    """Convert a folder.

    Args:
        folder: of a model of type ``gpt2``.
        stream: that it will be trained on, made with its tokenizer; None: not known yet.
        every: how manieth layer becomes a Switch layer with one expert; 0: none.

    Raises:
        AlmaError: the model has parts that ``alma_switch_lm`` has not, files are missing or damaged, or the stream has
            another tokenizer.
    """
    files = _weight_files(folder)
    for path in (folder / CONFIG, folder / TOKENIZER, *files):
        refuse_special(path)
        if path.name != TOKENIZER and not path.is_file():
            raise AlmaError(f"{folder}: there is no {path.name}; {_REMEDY}, whose weights are safetensors")
    content = read_json_object(folder / CONFIG, _REMEDY)
    if content.get("model_type") != "gpt2":
        raise AlmaError(f"{folder / CONFIG}: model_type {content.get('model_type')!r:.60} found; {_REMEDY}")
    config = as_record(content, GPT2, folder / CONFIG, _REMEDY)
    _refuse_other_parts(config, folder / CONFIG)
    num_tokens = _num_tokens(folder, config, stream)
    tensors = _Tensors(files)
    options = _options(config, every)
    try:
        weights = _weights(tensors, config, num_tokens, every)
        check_model(options, weights)
        tensors.refuse_unused()
    except KeyError as error:
        raise AlmaError(f"{folder / WEIGHTS}: there is no {error.args[0]} in it; {_REMEDY}") from error
    except (UnfitCheckpoint, RuntimeError, IndexError) as error:
        raise AlmaError(f"{folder / WEIGHTS}: not the weights of its {CONFIG} ({error}); {_REMEDY}") from error
    return _checkpoint(options, weights, stream)


class _Tensors:
    """The tensors of a model, which notes which of them were used.

    Args:
        files: of the weights.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._found: dict[str, Tensor] = {}
        self._used: set[str] = set()
        self._where = files[0]
        for path in files:
            for name, tensor in read_tensors(path, leave_out=_MASK).items():
                own = name.removeprefix("transformer.")
                if own in self._found:
                    raise AlmaError(f"{path}: two tensors are named {own}; {_REMEDY}")
                self._found[own] = tensor

    def __getitem__(self, name: str) -> Tensor:
        self._used.add(name)
        return self._found[name]

    def refuse_unused(self) -> None:
        """Raise AlmaError if tensors are left over that make it another model than the one that was made of it."""
        outputs, embeddings = self._found.get("lm_head.weight"), self._found["wte.weight"]
        if outputs is not None and not torch.equal(outputs, embeddings):
            raise AlmaError(f"{self._where}: lm_head.weight is not wte.weight; alma_switch_lm has one matrix for both")
        unused = sorted(self._found.keys() - self._used - {"lm_head.weight"})
        if unused:
            raise AlmaError(
                f"{self._where}: {len(unused)} tensor(s) that alma_switch_lm has no part for, {unused[0][:100]!r} the "
                f"first; {_REMEDY}, without adapters, whose {CONFIG} names all of its layers"
            )


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of the weights: one, or those that the index of several names, which stand beside it."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [folder / WEIGHTS]
    content = as_record(read_json_object(folder / INDEX, _REMEDY), WeightIndex, folder / INDEX, _REMEDY)
    names = sorted(set(content.weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise AlmaError(
                f"{folder / INDEX}: {name!r:.60} found, the name of a file of safetensors beside it is needed"
            )
    return [folder / name for name in names]


def _refuse_other_parts(config: GPT2, path: Path) -> None:
    needed = {
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    }
    for name, value in needed.items():
        if getattr(config, name) != value:
            raise AlmaError(
                f"{path}: {name} {getattr(config, name)!r} found; alma_switch_lm has {value!r}, so this model cannot "
                "be expressed"
            )
    if config.activation_function not in ACTIVATIONS:
        raise AlmaError(
            f"{path}: activation_function {config.activation_function!r:.60} found; {', '.join(ACTIVATIONS)} can be "
            "expressed"
        )
    end = config.eos_token_id
    if type(end) is not int or not 0 <= end < config.vocab_size:
        raise AlmaError(
            f"{path}: eos_token_id {end!r:.60} found, a token from 0 to {config.vocab_size - 1} is needed: fairseq's "
            "symbols take its row"
        )
    if config.n_embd % config.n_head:
        raise AlmaError(f"{path}: n_head {config.n_head} does not divide n_embd {config.n_embd}; {_REMEDY}")


def _num_tokens(folder: Path, config: GPT2, stream: Optional[Stream]) -> int:
    """Return how many of the embeddings' rows are tokens: some models have more rows than tokens."""
    own = StreamTokenizer(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else None
    if stream is not None:
        there = StreamTokenizer.open(stream.root)
        if own is not None and there.symbols != own.symbols:
            raise AlmaError(
                f"--stream {stream.root}: its tokenizer is not that of {folder}; prepare it with alma-prep-text "
                f"--tokenizer {folder / TOKENIZER}"
            )
        own = there
    found = config.vocab_size if own is None else own.vocab_size
    if found > config.vocab_size:
        raise AlmaError(f"{folder}: the tokenizer has {found:,} tokens, the model {config.vocab_size:,}; {_REMEDY}")
    return found


def _options(config: GPT2, every: int) -> dict[str, Any]:
    return {
        "_name": "alma_switch_lm",
        "activation_fn": ACTIVATIONS[config.activation_function],
        "dropout": float(config.resid_pdrop),
        "attention_dropout": float(config.attn_pdrop),
        "activation_dropout": 0.0,
        "decoder_embed_dim": config.n_embd,
        "decoder_ffn_embed_dim": config.n_inner or 4 * config.n_embd,
        "decoder_layers": config.n_layer,
        "decoder_attention_heads": config.n_head,
        "decoder_sinusoidal_pos": False,
        "no_scale_embedding": True,
        "tokens_per_sample": config.n_positions,
        "max_target_positions": None,
        **one_expert_options(every),
    }


def _weights(tensors: _Tensors, config: GPT2, num_tokens: int, every: int) -> dict[str, Tensor]:
    """Rename, and turn maps: GPT-2's are (in, out), as its Conv1D has them."""
    table, positions = tensors["wte.weight"], tensors["wpe.weight"]
    symbols = table[config.eos_token_id].expand(NUM_FAIRSEQ_SYMBOLS, -1)
    embeddings = torch.cat([symbols, table[:num_tokens]])
    new = {
        "decoder.embed_tokens.weight": embeddings,
        "decoder.output_projection.weight": embeddings,
        "decoder.embed_positions.weight": torch.cat([positions.new_zeros(EXTRA_POSITIONS, config.n_embd), positions]),
        "decoder.layer_norm.weight": tensors["ln_f.weight"].clone(),
        "decoder.layer_norm.bias": tensors["ln_f.bias"].clone(),
    }
    for layer in range(config.n_layer):
        here, there = f"decoder.layers.{layer}.", f"h.{layer}."
        for name, source in (("self_attn_layer_norm", "ln_1"), ("final_layer_norm", "ln_2")):
            for kind in ("weight", "bias"):
                new[f"{here}{name}.{kind}"] = tensors[f"{there}{source}.{kind}"].clone()
        maps = {"self_attn.qkv_proj": "attn.c_attn", "self_attn.out_proj": "attn.c_proj"}
        for name, source in {**maps, "fc1": "mlp.c_fc", "fc2": "mlp.c_proj"}.items():
            weight = tensors[f"{there}{source}.weight"].t().contiguous()
            bias = tensors[f"{there}{source}.bias"].clone()
            if name in maps or not has_experts(layer, every):
                new |= {f"{here}{name}.weight": weight, f"{here}{name}.bias": bias}
            else:
                stack = f"{here}switch.experts.{name}"
                new |= {f"{stack}_weight": weight.unsqueeze(0), f"{stack}_bias": bias.unsqueeze(0)}
        if has_experts(layer, every):
            # One row decides nothing; growth by splitting puts new rows below it.
            new[f"{here}switch.gate.weight"] = table.new_zeros(1, config.n_embd)
    return new


def _checkpoint(options: dict[str, Any], weights: dict[str, Tensor], stream: Optional[Stream]) -> Checkpoint:
    state = {} if stream is None else {DICTIONARY_KEY: stream.dictionary_sha256}
    task: dict[str, Any] = {"_name": "alma_lm", "tokens_per_sample": options["tokens_per_sample"]}
    if stream is not None:
        task["data"] = str(stream.root)
    return untrained_checkpoint({"_name": None, "model": options, "task": task}, weights, state)
