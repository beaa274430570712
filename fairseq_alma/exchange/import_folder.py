"""``alma-import``: a folder of Qwen3 or Qwen3-MoE becomes a checkpoint of ``alma_transformer_lm``. No fairseq.

Only ``config.json``, the tokenizer's files and ``model.safetensors``, or the files of its index, are read; no code of
the folder is run. Token u has row u + 4, as in a stream that was made with the folder's tokenizer. fairseq's symbols
replace the folder's own special tokens: ``</s>`` is its end of text, whose row u + 4 is then unused. Unused rows, and
symbols without a counterpart, never take part in a softmax (``symbol_ids``, see `data.tokens`).
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Iterator, Literal, Mapping, Optional, Sequence

import torch
from msgspec import Meta, Struct
from torch import Tensor

from fairseq_alma.checkpoints.checkpoint_file import DICTIONARY_KEY, Checkpoint, untrained_checkpoint
from fairseq_alma.checkpoints.model_options import NO_BEGINNING, USUAL_FREQUENCY
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import StreamTokenizer
from fairseq_alma.errors import AlmaError
from fairseq_alma.exchange.exportable import ARCHITECTURE
from fairseq_alma.exchange.tensor_file import WEIGHTS, differing_shapes, read_tensors, refuse_special
from fairseq_alma.exchange.tokenizer_files import CONFIG, TOKENIZER, TOKENIZER_CONFIG
from fairseq_alma.files import Name, as_record, read_json_object
from fairseq_alma.growth.gate_tree import has_experts

INDEX = "model.safetensors.index.json"
EMBEDDINGS, OUTPUTS = "model.embed_tokens.weight", "lm_head.weight"
SYMBOLS = ("bos", "pad", "eos", "unk")
"""Special tokens of a folder in the order of fairseq's symbols."""
_REMEDY = "give a folder with a model of type qwen3 or qwen3_moe"
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(\w+_proj)\.weight")
Size = Annotated[int, Meta(ge=1, le=10_000_000)]
Theta = Annotated[float, Meta(gt=0, le=1e12)]


class RopeParameters(Struct):
    """Rotary positions as transformers 5 writes them."""

    rope_type: str = "default"
    rope_theta: Optional[Theta] = None


class FolderConfig(Struct, kw_only=True):
    """``config.json``, as far as it decides what is computed; defaults as transformers has them."""

    model_type: Literal["qwen3", "qwen3_moe"]
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Meta(ge=1, le=1000)]
    num_attention_heads: Size
    num_key_value_heads: Optional[Size] = None
    head_dim: Optional[Size] = None
    max_position_embeddings: Size
    rms_norm_eps: Annotated[float, Meta(ge=0, le=1)] = 1e-6
    rope_theta: Theta = 10000.0
    rope_parameters: Optional[RopeParameters] = None
    rope_scaling: Optional[dict[str, Any]] = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    use_sliding_window: bool = False
    tie_word_embeddings: bool = False
    num_experts: Optional[Size] = None
    num_local_experts: Optional[Size] = None  # as transformers 5 writes it
    num_experts_per_tok: Size = 8
    norm_topk_prob: bool = False
    moe_intermediate_size: Size = 768
    decoder_sparse_step: Size = 1
    mlp_only_layers: Optional[list[int]] = None
    bos_token_id: Any = None
    eos_token_id: Any = None
    pad_token_id: Any = None
    unk_token_id: Any = None


class WeightIndex(Struct):
    """``model.safetensors.index.json``: the file of each tensor."""

    weight_map: Annotated[dict[str, Name], Meta(min_length=1, max_length=1_000_000)]


def import_folder(folder: Path, stream: Optional[Stream] = None) -> Checkpoint:
    """Convert a folder.

    Args:
        folder: of a model of type ``qwen3`` or ``qwen3_moe``, with its tokenizer.
        stream: that it will be trained on, made with its tokenizer; None: not known yet.

    Raises:
        AlmaError: the model has parts that ``alma_transformer_lm`` has not, files are missing or damaged, or the
            stream has another tokenizer.
    """
    refuse_special(folder / CONFIG)
    content = read_json_object(folder / CONFIG, _REMEDY)
    if content.get("model_type") not in ("qwen3", "qwen3_moe"):
        raise AlmaError(f"{folder / CONFIG}: model_type {content.get('model_type')!r:.60} found; {_REMEDY}")
    config = as_record(content, FolderConfig, folder / CONFIG, _REMEDY)
    options, mixtures = options_of(config, folder / CONFIG)
    refuse_special(folder / TOKENIZER)
    tokenizer = StreamTokenizer(folder / TOKENIZER)
    if tokenizer.vocab_size > config.vocab_size:
        raise AlmaError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size:,} tokens, the model {config.vocab_size:,}; {_REMEDY}"
        )
    if stream is not None and StreamTokenizer.open(stream.root).symbols != tokenizer.symbols:
        raise AlmaError(
            f"--stream {stream.root}: its tokenizer is not that of {folder}; prepare it with alma-prep-text "
            f"--tokenizer {folder}"
        )
    tensors = {name: tensor for path in _weight_files(folder) for name, tensor in read_tensors(path).items()}
    if differing := differing_shapes(tensors, options, config.vocab_size, mixtures):
        raise AlmaError(f"{folder}: not the weights of its {CONFIG} ({differing}); {_REMEDY}")
    symbol_ids, sources = symbols_of(folder, config, tokenizer)
    options["symbol_ids"] = json.dumps(symbol_ids)
    task: dict[str, Any] = {"_name": "alma_lm", "tokens_per_sample": config.max_position_embeddings}
    state = {}
    if stream is not None:
        task["data"], state = str(stream.root), {DICTIONARY_KEY: stream.dictionary_sha256}
    weights = dict(_renamed(tensors, sources))
    return untrained_checkpoint({"_name": None, "model": options, "task": task}, weights, state)


def options_of(config: FolderConfig, path: Path) -> tuple[dict[str, Any], list[bool]]:
    """Return ``cfg.model`` of an ``alma_transformer_lm`` that computes the same, and which layers have experts.

    Raises:
        AlmaError: ``alma_transformer_lm`` cannot compute what the model does.
    """
    is_moe, layers, dense = config.model_type == "qwen3_moe", range(config.num_hidden_layers), config.mlp_only_layers
    mixtures = [
        is_moe and layer not in (dense or []) and (layer + 1) % config.decoder_sparse_step == 0 for layer in layers
    ]
    num_experts = (config.num_experts or config.num_local_experts or 128) if is_moe else 1
    rope, heads = config.rope_parameters or RopeParameters(), config.num_attention_heads
    kv_heads = config.num_key_value_heads or heads
    head_dim = config.head_dim or (config.hidden_size // heads if is_moe else 128)
    ffn = config.moe_intermediate_size if all(mixtures) else config.intermediate_size
    needed: dict[str, tuple[Any, Any]] = {
        "hidden_act": (config.hidden_act, "silu"),
        "attention_bias": (config.attention_bias, False),
        "use_sliding_window": (config.use_sliding_window, False),
        "rope_scaling": (config.rope_scaling, None),
        "rope_type": (rope.rope_type, "default"),
        "num_attention_heads modulo num_key_value_heads": (heads % kv_heads, 0),
        "head_dim modulo 2": (head_dim % 2, 0),
    }
    if is_moe:
        needed["num_experts_per_tok"] = (config.num_experts_per_tok, 1)
        needed["norm_topk_prob"] = (config.norm_topk_prob, False)
        needed["moe_intermediate_size"] = (config.moe_intermediate_size, ffn)
    for name, (found, value) in needed.items():
        if found != value:
            raise AlmaError(f"{path}: {name} {found!r:.60} found; {ARCHITECTURE} has {value!r}; give another model")
    rules = (every for every in range(1, len(layers) + 1) if mixtures == [has_experts(each, every) for each in layers])
    every = next(rules, None) if is_moe and num_experts > 1 else min(USUAL_FREQUENCY, len(layers))
    if every is None or (is_moe and num_experts == 1):
        places = ", ".join(str(layer) for layer, here in enumerate(mixtures) if here) or "no layer"
        raise AlmaError(
            f"{path}: {num_experts} experts in {places} found (from 0); {ARCHITECTURE} has two or more in every n-th "
            "layer; give another model"
        )
    return {
        "_name": ARCHITECTURE,
        "dropout": 0.0,
        "decoder_embed_dim": config.hidden_size,
        "decoder_ffn_embed_dim": ffn,
        "decoder_layers": len(layers),
        "decoder_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rope_theta": float(rope.rope_theta or config.rope_theta),
        "norm_eps": config.rms_norm_eps,
        "no_embedding_norm": True,
        "share_decoder_input_output_embed": config.tie_word_embeddings,
        "num_experts": num_experts,
        "moe_freq": every,
        "capacity_factor": 1.0,
        "eval_capacity_factor": 0.0,
        "balance_loss_weight": 0.01,
        "gate_trees": "",
        "checkpoint_activations": False,
        "compile": False,
        "tokens_per_sample": config.max_position_embeddings,
        "max_target_positions": None,
        **NO_BEGINNING,
    }, mixtures


def symbols_of(folder: Path, config: FolderConfig, tokenizer: StreamTokenizer) -> tuple[list[Optional[int]], list[int]]:
    """Return the folder's token for each of fairseq's symbols.

    Returns:
        Token ids, each once, None for a symbol that the folder lacks; and for each symbol the token that initializes
        its row.

    Raises:
        AlmaError: the folder has no end of text.
    """
    named = read_json_object(folder / TOKENIZER_CONFIG, _REMEDY) if (folder / TOKENIZER_CONFIG).is_file() else {}
    found: list[Optional[int]] = []
    for symbol in SYMBOLS:
        name = named.get(f"{symbol}_token")
        name = name.get("content") if isinstance(name, dict) else name
        token = tokenizer.token_id(name) if isinstance(name, str) else getattr(config, f"{symbol}_token_id")
        token = token[0] if isinstance(token, list) and token else token
        found.append(token if type(token) is int and 0 <= token < config.vocab_size else None)
    end = found[2]
    if end is None:
        raise AlmaError(f"{folder}: neither its {TOKENIZER_CONFIG} nor its {CONFIG} has an end of text; {_REMEDY}")
    own: list[Optional[int]] = [None] * len(SYMBOLS)
    for number in (2, 1, 0, 3):  # the end of text often pads too
        if found[number] not in own:
            own[number] = found[number]
    return own, [end if token is None else token for token in found]


def _weight_files(folder: Path) -> Sequence[Path]:
    """Return the file of the weights, or the files that the index names, in the same folder."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [folder / WEIGHTS]
    index = as_record(read_json_object(folder / INDEX, _REMEDY), WeightIndex, folder / INDEX, _REMEDY)
    names = sorted(set(index.weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise AlmaError(f"{folder / INDEX}: {name!r:.60} found, the name of a file of safetensors is needed")
    return [folder / name for name in names]


def _renamed(tensors: Mapping[str, Tensor], sources: list[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint's weights: fairseq's symbols before the tokens, experts stacked."""
    table = torch.cat([tensors[EMBEDDINGS][sources], tensors[EMBEDDINGS]])
    outputs = tensors.get(OUTPUTS)
    yield "decoder.embed_tokens.weight", table
    yield "decoder.output_projection.weight", table if outputs is None else torch.cat([outputs[sources], outputs])
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        own = f"decoder.{name.removeprefix('model.')}"
        if found := _EXPERT.fullmatch(own):
            stacks.setdefault(f"{found[1]}{found[3]}", {})[int(found[2])] = tensor
        elif name not in (EMBEDDINGS, OUTPUTS):
            yield own, tensor
    for name, experts in stacks.items():
        yield name, torch.stack([experts[each] for each in range(len(experts))])
