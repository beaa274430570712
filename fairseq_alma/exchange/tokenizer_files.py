"""Export the tokenizer of a stream as files for transformers.

Token ids equal the ids in the stream: 0 to 3 are fairseq's special symbols, and token u of the tokenizer has id u + 4.
For an imported model, the export copies the original tokenizer instead, in which token u has id u.

By default, transformers encodes the name of a special token in a text as this token. ``split_special_tokens=True``
encodes the name as plain text, as ``alma-prep-text`` does.
"""

import json
from typing import Any, Iterable, Mapping, NamedTuple, Optional, Sequence

from tokenizers import Tokenizer

from fairseq_alma.data.tokens import EOS, FAIRSEQ_SYMBOLS, NUM_FAIRSEQ_SYMBOLS, StreamTokenizer
from fairseq_alma.errors import AlmaError

CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
EXPORTABLE = "train on a stream with a tokenizer.json written by alma-prep-text without --tokenizer"


class Vocabulary(NamedTuple):
    """Vocabulary of an exported folder.

    Attributes:
        files: content of the tokenizer files and of generation_config.json, by file name.
        special_ids: values of ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``.
        rows: embedding row in the checkpoint for each token of the folder; None if token u has row u.
        context: maximum sequence length of an imported model, in tokens; 0 for other models.
    """

    files: Mapping[str, str]
    special_ids: Mapping[str, Any]
    rows: Optional[list[int]] = None
    context: int = 0


def vocabulary_of(tokenizer: StreamTokenizer, context: int, replaced: Optional[Sequence[Optional[int]]]) -> Vocabulary:
    """Return the vocabulary of an exported folder.

    Args:
        tokenizer: tokenizer of the stream.
        context: maximum sequence length of the model, in tokens.
        replaced: for an imported model, id of the token that each fairseq symbol replaces, or None (see
            `data.tokens.absent_ids`); None for other models.

    Raises:
        AlmaError: the tokenizer cannot be exported.
    """
    if replaced is None:
        ids = {"bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": 1}
        generation = {**ids, "suppress_tokens": [0, 1, 3]}  # These symbols do not occur in training data.
        files = tokenizer_files(tokenizer, context)
        return Vocabulary({**files, "generation_config.json": json.dumps(generation, indent=2) + "\n"}, ids)
    path = tokenizer.file.with_name(CONFIG)
    if not path.is_file():
        raise AlmaError(
            f"{path}: missing, but required to export an imported model; give a stream prepared with alma-prep-text "
            "--tokenizer DIR, where DIR is the imported folder"
        )
    config = json.loads(path.read_text(encoding="utf-8"))
    rows = list(range(NUM_FAIRSEQ_SYMBOLS, NUM_FAIRSEQ_SYMBOLS + tokenizer.vocab_size))
    for symbol, token in enumerate(replaced):
        if token is not None:
            rows[token] = symbol
    return Vocabulary(
        files={
            each.name: each.read_text(encoding="utf-8")
            for each in (tokenizer.file, *tokenizer.companions)
            if each.name != CONFIG
        },
        special_ids={name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        rows=rows,
        context=config.get("max_position_embeddings", 0),
    )


def tokenizer_files(tokenizer: StreamTokenizer, context: int) -> dict[str, str]:
    """Return the content of tokenizer.json and tokenizer_config.json, by file name.

    Args:
        tokenizer: tokenizer of the stream.
        context: maximum sequence length of the model, in tokens.

    Raises:
        AlmaError: the type of the tokenizer cannot be exported.
    """
    for space in ("", " "):  # If the name <s> changes how text with "<s>" is encoded, use <s >.
        content, names = _with_symbols(tokenizer, space)
        if not misread_text(content, tokenizer, ["".join(FAIRSEQ_SYMBOLS), " ".join(FAIRSEQ_SYMBOLS)]):
            break
    end = names[EOS]
    beginning: dict[str, Any] = {"SpecialToken": {"id": end, "type_id": 0}}
    texts = [{"Sequence": {"id": each, "type_id": 0}} for each in "AB"]
    content |= {
        "truncation": None,
        "padding": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [beginning, texts[0]],
            "pair": [beginning, *texts],
            "special_tokens": {end: {"id": end, "ids": [EOS], "tokens": [end]}},
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{"bos_token": end, "eos_token": end, "pad_token": names[1], "unk_token": names[3]},
        "model_max_length": context,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    return {TOKENIZER: json.dumps(content, ensure_ascii=False), TOKENIZER_CONFIG: json.dumps(config, indent=2) + "\n"}


def beginning_of(content: str, trained: Optional[int]) -> str:
    """Describe the token before a text: in an exported tokenizer.json, and in training (id, None: ``<s>``)."""
    tokenizer = Tokenizer.from_str(content)
    encoding = tokenizer.encode("a")
    here = f"`{encoding.tokens[0]}`" if 1 in encoding.special_tokens_mask[:1] else "no token"
    there = "`<s>`" if trained is None else f"`{tokenizer.id_to_token(trained)}`"
    return (
        f"{here} before a text, {'as in training' if here == there else f'but fairseq_alma trains with {there} there'}"
    )


def misread_text(content: Mapping[str, Any], tokenizer: StreamTokenizer, texts: Iterable[str]) -> Optional[str]:
    """Return the first text that the exported tokenizer and the tokenizer of the stream encode differently, or None.

    Args:
        content: content of the exported tokenizer.json.
        tokenizer: tokenizer of the stream.
        texts: texts to compare.
    """
    exported = Tokenizer.from_str(json.dumps(content))
    exported.encode_special_tokens = True
    for text in texts:
        needed = [token + NUM_FAIRSEQ_SYMBOLS for token in tokenizer.encode_batch([text])[0]]
        if exported.encode(text, add_special_tokens=False).ids != needed:
            return text
    return None


def _with_symbols(tokenizer: StreamTokenizer, space: str) -> tuple[dict[str, Any], list[str]]:
    """Return (content of tokenizer.json with fairseq's symbols first, names of these symbols in the file)."""
    if tokenizer.kind != "tokenizers":
        raise AlmaError(f"{tokenizer.file}: expected a tokenizer.json, found a SentencePiece model; {EXPORTABLE}")
    content = json.loads(tokenizer.file.read_text(encoding="utf-8"))
    model = content["model"]
    vocabulary = model.get("vocab")  # piece -> id; for Unigram, a list of (piece, score) by id
    if not isinstance(vocabulary, (dict, list)):
        raise AlmaError(f"{tokenizer.file}: expected a vocabulary, found none (type {model.get('type')}); {EXPORTABLE}")
    names = [f"{name[:-1]}{space}>" for name in FAIRSEQ_SYMBOLS]
    while not {*tokenizer.pieces}.isdisjoint(names):  # includes added tokens, which need not be in the vocabulary
        names = [f"{name[:-1]} >" for name in names]
    if isinstance(vocabulary, dict):
        moved = {piece: token + NUM_FAIRSEQ_SYMBOLS for piece, token in vocabulary.items()}
        model["vocab"] = {**{name: token for token, name in enumerate(names)}, **moved}
    else:
        model["vocab"] = [*([name, -1e6] for name in names), *vocabulary]  # With this score, no text gets the piece.
        if model.get("unk_id") is not None:
            model["unk_id"] += NUM_FAIRSEQ_SYMBOLS
    added = content.get("added_tokens") or []
    for each in added:
        each["id"] += NUM_FAIRSEQ_SYMBOLS
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] = [*({"id": token, "content": name, **special} for token, name in enumerate(names)), *added]
    return content, names
