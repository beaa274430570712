"""Train a tokenizer, tokenize text, and read and write token files. This module imports neither fairseq nor torch.

The tokenizer of a stream is a ``tokenizer.json`` of the package ``tokenizers`` or a ``.model`` of SentencePiece. Token
files have the format of fairseq's ``MMapIndexedDataset``: ``NAME.bin`` contains the ids, and ``NAME.idx`` contains the
length and start of each sequence. `TokenFileWriter` writes a file in parts, to limit the memory for preparing text.
"""

import hashlib
import json
import math
import os
import re
import struct
from array import array
from pathlib import Path
from typing import Any, Callable, Iterable, Optional, Sequence, Union

import msgspec
import numpy as np

from fairseq_alma.data.stream import StreamFile
from fairseq_alma.errors import AlmaError, naming, refusing_damage

FAIRSEQ_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")
NUM_FAIRSEQ_SYMBOLS = 4  # fairseq's Dictionary begins with these symbols, so token u has id u + 4
EOS = 2
TOKENIZER_FOLDER = "tokenizer"
FILE_NAMES = {"tokenizers": "tokenizer.json", "sentencepiece": "sentencepiece.model"}
COMPANIONS = (
    "config.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja"
)  # fmt: skip
# Maximum vocabulary size. Without this limit, a small file with large token numbers would need much memory.
MAX_TOKENS = 1 << 24
AUTO = 0  # value of ``--vocab-size auto``: the size of the first mega-batch determines the vocabulary size
_WHITE_SPACE = re.compile(r"\s")
_LONG_WORD = 1000  # number of characters
_BLOCK = "\u2581"

# a loaded tokenizer: (list of pieces by token number, function from texts to token numbers, inverse function)
Backend = tuple[list[str], Callable[[Sequence[str]], list[list[int]]], Callable[[Sequence[list[int]]], list[str]]]


def vocab_size_for(num_bytes: int) -> int:
    """Return the power of two nearest to 1.6 * sqrt(bytes of mega-batch 0), but at least 512 and at most 32,768."""
    return int(min(32_768, max(512, 2 ** round(math.log2(1.6 * math.sqrt(max(1, num_bytes)))))))


def train_tokenizer(batches: Iterable[list[str]], vocab_size: int, num_threads: int = 1) -> bytes:
    """Train a tokenizer and return the content of its ``tokenizer.json``.

    Args:
        batches: lists of documents.
        vocab_size: requested vocabulary size. A small text can give a smaller vocabulary.
        num_threads: number of threads; does not change the result.
    """
    os.environ.setdefault("RAYON_NUM_THREADS", str(num_threads))
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if num_threads > 1 else "false"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    parts = ([part for text in batch for part in _without_long_words(text)] for batch in batches)
    tokenizer.train_from_iterator(parts, trainer)
    return tokenizer.to_str(pretty=True).encode()


def _without_long_words(text: str) -> list[str]:
    # Training takes time quadratic in the length of a word.
    parts = [text[start : start + _LONG_WORD] for start in range(0, len(text), _LONG_WORD)]
    return parts if any(len(part.split(None, 1)) < 2 for part in parts[:-1]) else [text]


def _load_tokenizers(path: Path) -> Backend:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8-sig"))
    # Training text must be encoded completely and literally, but the settings of a published tokenizer may truncate or
    # pad sequences, and parse special tokens in a text.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    if size > MAX_TOKENS:
        raise ValueError(f"expected at most {MAX_TOKENS:,} tokens, found token number {size - 1:,}")
    pieces = [""] * size
    for piece, token in vocabulary.items():
        pieces[token] = piece
    return (
        pieces,
        lambda texts: [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)],
        lambda texts: tokenizer.decode_batch(texts, skip_special_tokens=False),
    )


def _load_sentencepiece(path: Path) -> Backend:
    """Load a SentencePiece ``.model``.

    SentencePiece represents a space by U+2581, so it decodes a literal U+2581 as a space. Therefore, the encoding
    function converts a literal U+2581 to byte pieces, if the model has byte pieces and adds no space before a text.
    """
    from sentencepiece import SentencePieceProcessor

    processor: Any = SentencePieceProcessor(model_file=str(path))
    pieces = [processor.id_to_piece(token) for token in range(processor.get_piece_size())]
    number = {piece: token for token, piece in enumerate(pieces)}
    block = [number[piece] for byte in _BLOCK.encode() if (piece := f"<0x{byte:02X}>") in number]
    splits = len(block) == 3 and not processor.encode("a", out_type=str)[0].startswith(_BLOCK)

    def encode(text: str) -> list[int]:
        if not splits or _BLOCK not in text:
            return processor.encode(text)
        first, *others = (processor.encode(part) if part else [] for part in text.split(_BLOCK))
        return [*first, *(token for part in others for token in (*block, *part))]

    return pieces, lambda texts: [encode(text) for text in texts], lambda texts: processor.decode(list(texts))


class StreamTokenizer:
    """Converter between text and the symbols of ``dict.txt``.

    Args:
        path: a ``tokenizer.json``, a SentencePiece ``.model``, or a folder with one of these files.

    Attributes:
        file: tokenizer file.
        kind: ``tokenizers`` or ``sentencepiece``.
        pieces: piece of each token, such as ``Ġthe``.
        symbols: symbol of each token: the piece, or ``<unit:17>`` if ``dict.txt`` cannot contain the piece of token 17,
            for example because of white space. If ``<unit:17>`` is the piece of another token, the symbol is
            ``<<unit:17>>``. If ``config.json`` (of transformers, in the same folder) has a larger vocabulary size
            than the tokenizer, the list ends with symbols for the unused ids.
        vocab_size: number of symbols.
        companions: files of a transformers model in the same folder; a stream has copies of these files for exports.
        decode_batch: function that returns the text of each list of token ids.

    Raises:
        AlmaError: the tokenizer file is missing or damaged.
    """

    def __init__(self, path: Union[str, Path]) -> None:
        self.file = find_tokenizer_file(Path(path))
        self.kind = "tokenizers" if self.file.suffix == ".json" else "sentencepiece"
        load = _load_tokenizers if self.kind == "tokenizers" else _load_sentencepiece
        with refusing_damage(f"{self.file}: the package {self.kind} cannot load this file", "give another file"):
            self.pieces, self._encode, self.decode_batch = load(self.file)
        if not self.pieces:
            raise AlmaError(f"{self.file}: expected a trained tokenizer, found no tokens; give another file")
        self._token_of: dict[str, int] = {}  # symbol -> number of the token, ascending
        known, unused = {*self.pieces}, max(0, _num_rows(self.file.parent) - len(self.pieces))
        for number, piece in enumerate([*self.pieces, *[""] * unused]):
            is_taken = piece in FAIRSEQ_SYMBOLS or piece in self._token_of
            if not piece or _WHITE_SPACE.search(piece) or is_taken or piece.startswith("#fairseq:"):
                piece = f"<unit:{number}>"
                while piece in known:  # a token may have this text as its piece
                    piece = f"<{piece}>"
            self._token_of[piece] = number
        self.symbols = [*self._token_of]
        self.vocab_size = len(self.symbols)
        paths = [self.file.with_name(name) for name in COMPANIONS if self.kind == "tokenizers"]
        self.companions = [path for path in paths if path.is_file()]

    @classmethod
    def open(cls, stream: Union[str, Path]) -> "StreamTokenizer":
        """Load the tokenizer of the stream in the folder ``stream``."""
        return cls(Path(stream) / TOKENIZER_FOLDER)

    @property
    def dictionary(self) -> str:
        """Return the content of ``dict.txt``. All counts are 1, so that it depends only on the tokenizer."""
        return "".join(f"{symbol} 1\n" for symbol in self.symbols)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token numbers (at least 0) of each text. The id in a token file is the token number plus 4."""
        # Both packages raise Exception, for example if the vocabulary has no unknown token.
        with refusing_damage(f"{self.file}: cannot encode a text", "correct the text or tokenizer"):
            return self._encode(texts)

    def encode(self, text: str) -> list[str]:
        """Return the symbols of a text. fairseq's ``Dictionary.encode_line`` accepts the symbols joined by spaces."""
        return [self.symbols[token] for token in self.encode_batch([text])[0]]

    def decode(self, symbols: Iterable[str]) -> str:
        """Decode symbols to text; ignore empty symbols and the four special symbols of fairseq.

        Raises:
            AlmaError: a symbol is unknown to the tokenizer.
        """
        kept = [symbol for symbol in symbols if symbol and symbol not in FAIRSEQ_SYMBOLS]
        try:
            return self.decode_batch([[self._token_of[symbol] for symbol in kept]])[0]
        except KeyError as error:
            raise AlmaError(f"{self.file}: no symbol {error}; use the tokenizer that encoded the text") from error


def find_tokenizer_file(path: Path) -> Path:
    """Return the tokenizer file at a path: the file itself; in a folder, tokenizer.json or else the only ``.model``.

    Raises:
        AlmaError: the path is not a tokenizer file, or the folder has neither tokenizer.json nor a single ``.model``.
    """
    if not path.is_dir():
        if path.suffix not in (".json", ".model"):
            raise AlmaError(
                f"{path}: expected a tokenizer.json or a SentencePiece .model; give such a file, or its folder"
            )
        if not path.is_file():
            raise AlmaError(f"{path}: no such file; give a tokenizer.json, a SentencePiece .model, or its folder")
        return path
    if (path / FILE_NAMES["tokenizers"]).is_file():  # A folder of transformers may also have a .model.
        return path / FILE_NAMES["tokenizers"]
    found = [file for file in sorted(path.iterdir()) if file.suffix == ".model"]
    if len(found) != 1:
        names = " and ".join(file.name for file in found) or "neither a tokenizer.json nor a .model"
        raise AlmaError(f"{path}: expected one tokenizer in the folder, found {names}; give a tokenizer file")
    return found[0]


def _num_rows(folder: Path) -> int:
    # vocabulary size in ``config.json`` (of transformers), or 0 if there is no valid size
    try:
        size = json.loads((folder / "config.json").read_text(encoding="utf-8-sig")).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return 0
    return size if type(size) is int and size <= MAX_TOKENS else 0


def absent_ids(symbol_ids: str) -> list[int]:
    """Return the dictionary ids to which a model with an imported vocabulary gives almost no probability.

    Args:
        symbol_ids: JSON list with one entry for each of the four symbols of fairseq: id of the equivalent token in
            the imported vocabulary, or null.
    """
    try:
        imported = msgspec.json.decode(
            symbol_ids, type=tuple[Optional[int], Optional[int], Optional[int], Optional[int]]
        )
    except msgspec.MsgspecError as error:
        raise AlmaError(
            f"--symbol-ids {symbol_ids[:60]!r}: expected a JSON list of four token ids or nulls; "
            "give the value that alma-import wrote to the checkpoint"
        ) from error
    return [symbol if token is None else token + NUM_FAIRSEQ_SYMBOLS for symbol, token in enumerate(imported)]


# Each alternative starts and ends at a split of the rule, provided that the preceding text ended at a split:
_CHUNK = re.compile(
    # letters or digits before other ASCII characters (a letter outside ASCII would continue the word)
    r" ?(?:[A-Za-z]+(?=[!-@\[-`{-~ \n]|\Z)|[0-9]+(?=[!-/:-~ \n]|\Z))"
    # one line feed before the first word of the next line
    r"|\n(?=\S)"
    # a contraction such as 's and further letters: the rule cuts after "'s"
    r"|'[A-Za-z]+(?=[!-@\[-`{-~ \n]|\Z)"
    # punctuation up to a letter, a digit or a space, unless it begins a contraction
    r"| ?(?!'[A-Za-z])[!-/:-@\[-`{-~]+(?=[A-Za-z0-9 \n]|\Z)"
    # otherwise, all characters up to the next white space, including white space at the start
    r"|\s*\S+|\s+\Z"
)


class DocumentEncoder:
    """Encode documents as bytes of a token file, and cache up to ``cache_size`` chunks (about 200 bytes each).

    With a cache, encoding is several times faster than with `StreamTokenizer`. The pre-tokenization rule of GPT-2
    splits a text into words before any merge. So a chunk that begins and ends at such a split always has the same token
    ids. The cache stores the ids of chunks. A regular expression finds chunks, and splits only at places where the rule
    also splits. The encoder does not split documents that contain added tokens or the control characters U+001C to
    U+001F. A test compares the ids of unusual text with the ids of the tokenizer.
    """

    def __init__(self, tokenizer: StreamTokenizer, cache_size: int) -> None:
        self._tokenizer = tokenizer
        self.dtype = id_dtype(tokenizer.vocab_size)
        self._eos = np.array([EOS], dtype=self.dtype).tobytes()
        self._cache: dict[str, bytes] = {}
        self._cache_size = cache_size
        self._unsplit = _unsplit_documents(tokenizer.file) if tokenizer.kind == "tokenizers" else re.compile("")

    def encode(self, documents: Sequence[str]) -> list[bytes]:
        """Return the token ids of each document, followed by the id of EOS, as the bytes of a token file."""
        unsplit = [number for number, document in enumerate(documents) if self._unsplit.search(document)]
        tokens = self._tokenizer.encode_batch([documents[number] for number in unsplit])
        encoded = {number: self._ids(each) + self._eos for number, each in zip(unsplit, tokens, strict=True)}
        others = [number for number in range(len(documents)) if number not in encoded]
        chunked = [_CHUNK.findall(documents[number]) for number in others]
        missing = list(set().union(*chunked) - self._cache.keys())
        self._cache.update(zip(missing, map(self._ids, self._tokenizer.encode_batch(missing)), strict=True))
        for number, chunks in zip(others, chunked, strict=True):
            encoded[number] = b"".join(map(self._cache.__getitem__, chunks)) + self._eos
        # Frequent chunks occur early, so a full cache keeps the old chunks and stores no new chunk.
        keep = self._cache_size - (len(self._cache) - len(missing))
        for chunk in [chunk for chunk in missing if len(chunk) > 32] if keep > 0 else missing:
            del self._cache[chunk]
        return [encoded[number] for number in range(len(documents))]

    def _ids(self, tokens: list[int]) -> bytes:
        return (np.array(tokens, dtype=self.dtype) + self.dtype.type(NUM_FAIRSEQ_SYMBOLS)).tobytes()


def _unsplit_documents(tokenizer_json: Path) -> re.Pattern:
    content = json.loads(tokenizer_json.read_text(encoding="utf-8-sig"))
    model, pre_tokenizer = content["model"], content.get("pre_tokenizer") or {}
    is_bpe = model.get("type") == "BPE" and not model.get("dropout") and not content.get("normalizer")
    is_gpt2_rule = pre_tokenizer.get("type") == "ByteLevel" and pre_tokenizer.get("use_regex", True)
    if not is_bpe or not is_gpt2_rule or pre_tokenizer.get("add_prefix_space", True):
        return re.compile("")  # matches every document
    added = [re.escape(token["content"]) for token in content.get("added_tokens") or []]
    # The control characters are white space for Python, but not for the rule.
    return re.compile("|".join(["[\x1c\x1d\x1e\x1f]", *added]))


_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_DTYPES: dict[int, np.dtype] = {8: np.dtype("uint16"), 9: np.dtype("uint32")}
_HEADER = struct.Struct("<9sQBQ")


def id_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype of token ids in fairseq's token files for ``vocab_size`` tokens and four special symbols."""
    return np.dtype("uint16") if vocab_size + NUM_FAIRSEQ_SYMBOLS < 65500 else np.dtype("uint32")


class TokenFileWriter:
    """Writer of a token file: `write` fills a buffer, `flush` appends the buffer to ``.bin``, `close` writes ``.idx``.

    Args:
        root: folder of the stream.
        name: path of the files in ``root`` without ``.bin`` and ``.idx``; the files must not exist.
        dtype: NumPy type of an id, ``uint16`` or ``uint32``.
    """

    def __init__(self, root: Path, name: str, dtype: np.dtype) -> None:
        self.root, self.name, self.dtype = root, name, dtype
        self._pending = bytearray()
        self._digest, self._size = hashlib.sha256(), 0
        self._sizes = array("i")

    def write(self, ids: bytes, sizes: np.ndarray) -> None:
        """Add sequences to the buffer: concatenated ids as bytes of ``dtype``, and number of ids of each sequence."""
        self._pending += ids
        self._sizes.frombytes(sizes.astype("=i4").tobytes())

    def flush(self) -> None:
        """Append the buffered sequences to ``.bin``, and empty the buffer."""
        path = self.root / f"{self.name}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        with naming(path), open(path, "ab") as file:
            file.write(self._pending)
        self._digest.update(self._pending)
        self._size += len(self._pending)
        self._pending.clear()

    def close(self) -> tuple[StreamFile, StreamFile]:
        """Write the buffered sequences and the index. Return the manifest entries of ``.bin`` and ``.idx``."""
        self.flush()
        code = next(code for code, dtype in _DTYPES.items() if dtype == self.dtype)
        sizes = np.array(self._sizes, np.int32)
        starts = (np.cumsum(sizes, dtype=np.int64) - sizes) * self.dtype.itemsize
        path = self.root / f"{self.name}.idx"
        with naming(path), open(path, "wb") as file:
            file.write(_HEADER.pack(_MAGIC, _VERSION, code, len(sizes)))
            file.write(sizes.astype("<i4", copy=False).data)
            file.write(starts.astype("<i8", copy=False).data)
        return (
            StreamFile(f"{self.name}.bin", self._size, self._digest.hexdigest()),
            StreamFile.describe(self.root, f"{self.name}.idx"),
        )


class TokenFile:
    """A memory-mapped token file. Verify the file first (`Stream.verify`): the sha256 finds all damage.

    Args:
        prefix: path of the files without ``.bin`` and ``.idx``.

    Attributes:
        ids: ``(num_tokens,)`` memory map of all ids.
        sizes: ``(num_sequences,)``, int32: number of ids of each sequence.
    """

    def __init__(self, prefix: Union[str, Path]) -> None:
        with open(f"{prefix}.idx", "rb") as file:
            _, _, code, num_sequences = _HEADER.unpack(file.read(_HEADER.size))
            self.sizes = np.fromfile(file, "<i4", num_sequences)
        dtype = _DTYPES[code]
        self.ids = np.memmap(f"{prefix}.bin", dtype, mode="r") if len(self.sizes) else np.empty(0, dtype)
