"""A stream's tokenizer as ``transformers`` reads one: a ``tokenizer.json`` whose ids are those of the token files.

fairseq's four symbols come first, so that token u has id u + 4. What text looks like one of them is text: special
tokens are never looked for in it, neither there nor here.
"""

import json
from typing import Any, Iterable, Sequence

from fairseq_alma.data.token_file import NUM_FAIRSEQ_SYMBOLS
from fairseq_alma.data.tokenizer import FAIRSEQ_SYMBOLS, StreamTokenizer
from fairseq_alma.errors import AlmaError

_REMEDY = "export needs a byte-level BPE, or a sentencepiece model of type unigram, as alma-prep-text trains them"
_UNMATCHED = -1e6  # score of pieces that no text may become
_SPACE = "\u2581"


def tokenizer_files(tokenizer: StreamTokenizer, max_positions: int, starts_with_bos: bool) -> dict[str, str]:
    """Return the content of ``tokenizer.json``, ``tokenizer_config.json`` and ``special_tokens_map.json``.

    Args:
        tokenizer: the stream's.
        max_positions: longest sequence of the model, in tokens.
        starts_with_bos: whether sequences begin with ``<s>`` (fairseq's ``--add-bos-token``) rather than ``</s>``.

    Raises:
        AlmaError: it is of a kind that cannot be written so.
    """
    if tokenizer.kind == "tokenizers":
        content, specials = _from_tokenizers(tokenizer)
    else:
        content, specials = _from_sentencepiece(tokenizer)
    bos = specials[0 if starts_with_bos else 2]
    content["truncation"] = content["padding"] = None
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 0}},
        ],
        "special_tokens": {bos: {"id": bos, "ids": [specials.index(bos)], "tokens": [bos]}},
    }
    names = {"bos_token": bos, "eos_token": specials[2], "pad_token": specials[1], "unk_token": specials[3]}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "model_max_length": max_positions,
        "padding_side": "left",
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": json.dumps(content, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "special_tokens_map.json": json.dumps(names, indent=2) + "\n",
    }


def check_same_ids(content: str, tokenizer: StreamTokenizer, texts: Iterable[str]) -> None:
    """Raise AlmaError unless a ``tokenizer.json`` gives the ids of the stream's tokenizer.

    Args:
        content: of the file.
        tokenizer: the stream's.
        texts: to compare them on.
    """
    from tokenizers import Tokenizer

    exported = Tokenizer.from_str(content)
    exported.encode_special_tokens = True
    for text in texts:
        needed = [token + NUM_FAIRSEQ_SYMBOLS for token in tokenizer.encode_batch([text])[0]]
        if exported.encode(text, add_special_tokens=False).ids != needed:
            raise AlmaError(
                f"{tokenizer.file}: as a tokenizer.json it gives other ids, first for {text[:40]!r}; {_REMEDY}"
            )


def _from_tokenizers(tokenizer: StreamTokenizer) -> tuple[dict[str, Any], list[str]]:
    """Shift all ids of a ``tokenizer.json``, and put fairseq's symbols before them."""
    content = json.loads(tokenizer.file.read_text(encoding="utf-8"))
    model = content["model"]
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict):
        raise AlmaError(f"{tokenizer.file}: a model of type {model.get('type')} found; {_REMEDY}")
    specials = _special_names(vocabulary, space="" if model.get("type") == "BPE" else " ")
    shifted = {piece: token + NUM_FAIRSEQ_SYMBOLS for piece, token in vocabulary.items()}
    model["vocab"] = {**{name: token for token, name in enumerate(specials)}, **shifted}
    for added in content.get("added_tokens") or []:
        added["id"] += NUM_FAIRSEQ_SYMBOLS
    content["added_tokens"] = [_added(token, name) for token, name in enumerate(specials)] + (
        content.get("added_tokens") or []
    )
    return content, specials


def _from_sentencepiece(tokenizer: StreamTokenizer) -> tuple[dict[str, Any], list[str]]:
    """Write a unigram model of sentencepiece in the terms of ``tokenizers``."""
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]
    model, kinds = proto.FromString(tokenizer.file.read_bytes()), proto.SentencePiece
    spec, trainer = model.normalizer_spec, model.trainer_spec
    has_own_rules = spec.precompiled_charsmap or spec.remove_extra_whitespaces or spec.add_dummy_prefix
    if trainer.model_type != trainer.UNIGRAM or has_own_rules or not spec.escape_whitespaces:
        raise AlmaError(f"{tokenizer.file}: of another type, or it alters text before it is cut; {_REMEDY}")
    if any(piece.type == kinds.USER_DEFINED for piece in model.pieces):
        raise AlmaError(f"{tokenizer.file}: it has symbols that a user defined; {_REMEDY}")
    # A space stands in no text any more when its pieces are looked up, so no text becomes what has one in its name.
    specials = _special_names([piece.piece for piece in model.pieces], space=" ")
    pieces: list[list[Any]] = [[name, _UNMATCHED] for name in specials]
    unknown = None
    for number, piece in enumerate(model.pieces):
        if piece.type in (kinds.UNKNOWN, kinds.CONTROL, kinds.UNUSED):
            unknown = len(pieces) if piece.type == kinds.UNKNOWN else unknown
            pieces.append([f"<unit:{number} >", _UNMATCHED])
        else:
            pieces.append([piece.piece, _UNMATCHED if piece.type == kinds.BYTE else piece.score])
    as_space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    content = {
        "version": "1.0",
        "added_tokens": [_added(token, name) for token, name in enumerate(specials)],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [as_space, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": pieces, "byte_fallback": trainer.byte_fallback},
    }
    return content, specials


def _special_names(taken: Sequence[str] | dict[str, int], space: str) -> list[str]:
    """Return names for fairseq's symbols that no piece has: ``</s>``, or with a space where text may become one."""
    names = [f"{name[:-1]}{space}>" for name in FAIRSEQ_SYMBOLS]
    while any(name in taken for name in names):
        names = [f"{name[:-1]} >" for name in names]
    return names


def _added(token: int, name: str) -> dict[str, Any]:
    how = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token, "content": name, **how}
