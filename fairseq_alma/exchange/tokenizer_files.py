"""A stream's tokenizer as the files that transformers reads.

The ids are those of the token files: fairseq's four symbols come first, token u has id u + 4. As users of transformers
expect, special tokens are found in a text; ``tokenizer(text, split_special_tokens=True)`` takes the text literally, as
preparing and scoring here do. The tokenizer of an imported model is exported unchanged.
"""

import json
from dataclasses import dataclass
from typing import Any, Collection, Iterable, Mapping, Optional

from fairseq_alma.data.tokens import EOS, FAIRSEQ_SYMBOLS, NUM_FAIRSEQ_SYMBOLS, StreamTokenizer
from fairseq_alma.errors import AlmaError

CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
_NEVER, _RARELY = -1e6, -1e5  # scores of pieces that no text becomes, and of bytes
_SPACE = "\u2581"  # sentencepiece's


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of an exported folder.

    Attributes:
        files: content of the tokenizer's files and of ``generation_config.json``.
        special_ids: ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``.
        rows: for each of the folder's tokens its row in the checkpoint; None: as there.
        context: longest sequence that an imported folder stated, in tokens; 0: not imported.
    """

    files: Mapping[str, str]
    special_ids: Mapping[str, Any]
    rows: Optional[list[int]] = None
    context: int = 0


def vocabulary_of(tokenizer: StreamTokenizer, context: int, symbol_ids: Optional[str], has_bos: bool) -> Vocabulary:
    """Return the vocabulary of an exported folder.

    Args:
        tokenizer: the stream's.
        context: longest sequence of the model, in tokens.
        symbol_ids: of an imported model the ids that fairseq's symbols have in its folder, see `data.tokens`.
        has_bos: whether sequences begin with ``<s>`` rather than ``</s>``.

    Raises:
        AlmaError: the tokenizer cannot be exported.
    """
    if symbol_ids:
        return _kept_vocabulary(tokenizer, json.loads(symbol_ids))
    ids = {"bos_token_id": 0 if has_bos else EOS, "eos_token_id": EOS, "pad_token_id": 1}
    files = tokenizer_files(tokenizer, context, ids["bos_token_id"])
    # no training text has fairseq's other symbols
    generation = {**ids, "suppress_tokens": [0, 1, 3]}
    return Vocabulary({**files, "generation_config.json": _json(generation)}, ids)


def _kept_vocabulary(tokenizer: StreamTokenizer, symbol_ids: list[Optional[int]]) -> Vocabulary:
    folder = tokenizer.file.parent
    kept = [tokenizer.file, *(path for path in tokenizer.companions if path.name != CONFIG)]
    if not (folder / CONFIG).is_file():
        raise AlmaError(
            f"{folder}: there is no {CONFIG} of the imported model in it; give a stream made with alma-prep-text "
            "--tokenizer DIR, the folder that was imported"
        )
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    rows = list(range(NUM_FAIRSEQ_SYMBOLS, NUM_FAIRSEQ_SYMBOLS + tokenizer.vocab_size))
    for symbol, token in enumerate(symbol_ids):
        if token is not None:
            rows[token] = symbol
    ids = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    files = {path.name: path.read_text(encoding="utf-8") for path in kept}
    return Vocabulary(files, ids, rows, config.get("max_position_embeddings", 0))


def tokenizer_files(tokenizer: StreamTokenizer, context: int, bos: int = EOS) -> dict[str, str]:
    """Return the content of ``tokenizer.json`` and ``tokenizer_config.json``.

    Args:
        tokenizer: the stream's.
        context: longest sequence of the model, in tokens.
        bos: id of the symbol that sequences begin with.

    Raises:
        AlmaError: it is of a kind that cannot be written so.
    """
    for space in ("", " "):  # a special token that literal text becomes gets a space in its name
        content, names = _content(tokenizer, space)
        if not _misread(content, tokenizer, ["".join(FAIRSEQ_SYMBOLS), " ".join(FAIRSEQ_SYMBOLS)]):
            break
    first: dict[str, Any] = {"SpecialToken": {"id": names[bos], "type_id": 0}}
    texts = [{"Sequence": {"id": each, "type_id": 0}} for each in "AB"]
    content |= {
        "truncation": None,
        "padding": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, texts[0]],
            "pair": [first, *texts],
            "special_tokens": {names[bos]: {"id": names[bos], "ids": [bos], "tokens": [names[bos]]}},
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{"bos_token": names[bos], "eos_token": names[2], "pad_token": names[1], "unk_token": names[3]},
        "model_max_length": context,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    return {TOKENIZER: json.dumps(content, ensure_ascii=False), TOKENIZER_CONFIG: _json(config)}


def check_same_ids(content: str, tokenizer: StreamTokenizer, texts: Iterable[str]) -> None:
    """Raise AlmaError unless a ``tokenizer.json`` gives texts, taken literally, the ids of the stream's tokenizer."""
    if (text := _misread(json.loads(content), tokenizer, texts)) is not None:
        raise AlmaError(
            f"{tokenizer.file}: as a tokenizer.json it gives other ids, first for {text[:40]!r}; {_OTHER_TOKENIZER}"
        )


_OTHER_TOKENIZER = "tokenizers that alma-prep-text trains, and most tokenizer.json files, can be exported"


def _misread(content: Mapping[str, Any], tokenizer: StreamTokenizer, texts: Iterable[str]) -> Optional[str]:
    """Return the first text that gets other ids, or None."""
    from tokenizers import Tokenizer

    exported = Tokenizer.from_str(json.dumps(content))
    exported.encode_special_tokens = True
    for text in texts:
        needed = [token + NUM_FAIRSEQ_SYMBOLS for token in tokenizer.encode_batch([text])[0]]
        if exported.encode(text, add_special_tokens=False).ids != needed:
            return text
    return None


def _content(tokenizer: StreamTokenizer, space: str) -> tuple[dict[str, Any], list[str]]:
    """Return ``tokenizer.json`` with all ids moved after fairseq's symbols, and the names of these."""
    is_json = tokenizer.kind == "tokenizers"
    content = json.loads(tokenizer.file.read_text(encoding="utf-8")) if is_json else _from_sentencepiece(tokenizer)
    model = content["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        names = _special_names(vocabulary, space)
        moved = {piece: token + NUM_FAIRSEQ_SYMBOLS for piece, token in vocabulary.items()}
        model["vocab"] = {**{name: token for token, name in enumerate(names)}, **moved}
    elif isinstance(vocabulary, list):  # Unigram: pieces and their scores, by id
        names = _special_names([piece for piece, _ in vocabulary], space)
        model["vocab"] = [*([name, _NEVER] for name in names), *vocabulary]
        if model.get("unk_id") is not None:
            model["unk_id"] += NUM_FAIRSEQ_SYMBOLS
    else:
        raise AlmaError(f"{tokenizer.file}: a model of type {model.get('type')} found; {_OTHER_TOKENIZER}")
    added = content.get("added_tokens") or []
    for each in added:
        each["id"] += NUM_FAIRSEQ_SYMBOLS
    how = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] = [*({"id": token, "content": name, **how} for token, name in enumerate(names)), *added]
    return content, names


def _from_sentencepiece(tokenizer: StreamTokenizer) -> dict[str, Any]:
    """Return a unigram model of sentencepiece in the terms of ``tokenizers``."""
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]
    model, kinds = proto.FromString(tokenizer.file.read_bytes()), proto.SentencePiece
    spec, trainer = model.normalizer_spec, model.trainer_spec
    has_own_rules = spec.precompiled_charsmap or spec.remove_extra_whitespaces or spec.add_dummy_prefix
    if trainer.model_type != trainer.UNIGRAM or has_own_rules or not spec.escape_whitespaces:
        raise AlmaError(f"{tokenizer.file}: not a unigram model, or it normalizes text; {_OTHER_TOKENIZER}")
    if any(piece.type == kinds.USER_DEFINED for piece in model.pieces):
        raise AlmaError(f"{tokenizer.file}: it has user-defined symbols; {_OTHER_TOKENIZER}")
    known = {piece.piece for piece in model.pieces}
    pieces: list[list[Any]] = []
    unknown = None
    for number, piece in enumerate(model.pieces):
        if piece.type in (kinds.UNKNOWN, kinds.CONTROL, kinds.UNUSED):
            unknown = number if piece.type == kinds.UNKNOWN else unknown
            pieces.append([f"<unit:{number} >", _NEVER])
        elif piece.type != kinds.BYTE:
            pieces.append([piece.piece, piece.score])
        elif (character := chr(int(piece.piece[1:-1], 16))) < "\x80" and character not in known:
            pieces.append([character, _RARELY])  # so that no special token is likelier than a text of bytes
        else:
            pieces.append([piece.piece, _NEVER])
    as_space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return {
        "version": "1.0",
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [as_space, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": pieces, "byte_fallback": trainer.byte_fallback},
    }


def _special_names(taken: Collection[str], space: str) -> list[str]:
    """Return names for fairseq's symbols that no piece has."""
    names = [f"{name[:-1]}{space}>" for name in FAIRSEQ_SYMBOLS]
    while any(name in taken for name in names):
        names = [f"{name[:-1]} >" for name in names]
    return names


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
