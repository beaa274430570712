"""The tokens of a text stream: its tokenizer, the symbols that stand for tokens in ``dict.txt``, and token files.

Two kinds of tokenizer are read as they are: a ``tokenizer.json`` of the ``tokenizers`` package and a sentencepiece
``.model``. Each package is imported only when its kind is used.

Token files are in fairseq's memory-mapped format, laid out as its ``MMapIndexedDataset``: ``NAME.bin`` holds the ids,
``NAME.idx`` where each sequence begins. They are written with NumPy, piece by piece, so that preparing text needs
neither fairseq nor torch and no memory to speak of.
"""

import hashlib
import json
import re
import struct
from array import array
from functools import cached_property
from pathlib import Path
from typing import Iterable, Optional, Protocol, Sequence, Union

import msgspec
import numpy as np

from fairseq_alma.errors import AlmaError, naming

FAIRSEQ_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")
TOKENIZER_FOLDER = "tokenizer"
FILE_NAMES = {"tokenizers": "tokenizer.json", "sentencepiece": "sentencepiece.model"}

COMPANIONS = (
    "config.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja"
)  # fmt: skip
_WHITE_SPACE = re.compile(r"\s")
_BLOCK = "\u2581"


class _Backend(Protocol):
    """What a package's tokenizer is asked for; tokens are numbered from 0."""

    pieces: list[str]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode_batch(self, texts: Sequence[list[int]]) -> list[str]: ...


MAX_TOKENS = 1 << 24
"""More than any vocabulary; a file of a few bytes may number its tokens up to 2^32."""


class _TokenizersBackend:
    """A ``tokenizer.json``."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8-sig"))
        # A published tokenizer may cut or fill up its sequences and look for special tokens in the text;
        # a training text is wanted whole and taken literally.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        size = max(vocabulary.values(), default=-1) + 1
        if size > MAX_TOKENS:
            raise ValueError(f"a token of number {size - 1:,}, at most {MAX_TOKENS:,} can be told apart")
        self.pieces = [""] * size
        for piece, token in vocabulary.items():
            self.pieces[token] = piece

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode_batch(self, texts: Sequence[list[int]]) -> list[str]:
        return self._tokenizer.decode_batch(texts, skip_special_tokens=False)


class _SentencepieceBackend:
    """A sentencepiece ``.model``.

    sentencepiece spells a space as U+2581, so it would decode that character as a space. A model with byte pieces gets
    the bytes of the character instead, unless it puts a space before every text.
    """

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        self._processor = SentencePieceProcessor(model_file=str(path))
        self.pieces = [self._processor.id_to_piece(token) for token in range(self._processor.get_piece_size())]
        number = {piece: token for token, piece in enumerate(self.pieces)}
        self._block = [number[piece] for byte in _BLOCK.encode() if (piece := f"<0x{byte:02X}>") in number]
        self._splits = len(self._block) == 3 and not self._processor.encode("a", out_type=str)[0].startswith(_BLOCK)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        if not self._splits or _BLOCK not in text:
            return self._processor.encode(text)
        first, *others = (self._processor.encode(part) if part else [] for part in text.split(_BLOCK))
        return [*first, *(token for part in others for token in (*self._block, *part))]

    def decode_batch(self, texts: Sequence[list[int]]) -> list[str]:
        return self._processor.decode(list(texts))


class StreamTokenizer:
    """Text to the symbols of ``dict.txt``, and back.

    Args:
        path: a ``tokenizer.json``, a sentencepiece ``.model``, or a folder that holds one.

    Attributes:
        file: the file that was read.
        kind: ``tokenizers`` or ``sentencepiece``.
        symbols: one per token, in the order of the tokens: the piece as the tokenizer spells it (``Ġthe``), or
            ``<unit:17>`` where that would not survive in a ``dict.txt`` (white space, a name of fairseq's own). Where
            a transformers ``config.json`` beside the file has a larger vocabulary, its unused rows are the last ones.

    Raises:
        AlmaError: there is no tokenizer, or it cannot be read.
    """

    def __init__(self, path: Union[str, Path]) -> None:
        self.file = find_tokenizer_file(Path(path))
        self.kind = "tokenizers" if self.file.suffix == ".json" else "sentencepiece"
        with open(self.file, "rb"):
            pass  # a right to read that is missing is no damage
        try:
            backend: _Backend
            backend = _TokenizersBackend(self.file) if self.kind == "tokenizers" else _SentencepieceBackend(self.file)
        except Exception as error:  # both packages raise bare Exception or RuntimeError for any damaged file
            raise AlmaError(f"{self.file}: not a {self.kind} tokenizer ({error}); give another file") from error
        if not backend.pieces:
            raise AlmaError(f"{self.file}: a tokenizer without tokens found; give one that has been trained")
        self._backend = backend
        unused = max(0, _num_rows(self.file.parent) - len(backend.pieces))
        self.symbols = _dictionary_symbols([*backend.pieces, *[""] * unused])

    @classmethod
    def open(cls, stream: Union[str, Path]) -> "StreamTokenizer":
        """Load the tokenizer of the stream in this folder."""
        return cls(Path(stream) / TOKENIZER_FOLDER)

    @property
    def companions(self) -> list[Path]:
        """Files beside it that describe a model of transformers which it came with; a stream keeps them for exports."""
        paths = [self.file.with_name(name) for name in COMPANIONS if self.kind == "tokenizers"]
        return [path for path in paths if path.is_file()]

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self.symbols)

    @cached_property
    def _token_of(self) -> dict[str, int]:
        return {symbol: token for token, symbol in enumerate(self.symbols)}

    def token_id(self, piece: str) -> Optional[int]:
        """Return the number of a token, from 0, by its piece; None if there is none."""
        return self._backend.pieces.index(piece) if piece in self._backend.pieces else None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text; the id in a token file is the token's number plus 4."""
        try:
            return self._backend.encode_batch(texts)
        except Exception as error:  # bare ones, as of a vocabulary without the token for what it does not know
            raise AlmaError(f"{self.file}: cannot encode a text ({error}); give another tokenizer") from error

    def encode(self, text: str) -> list[str]:
        """Return the symbols of a text; joined by spaces they are what fairseq's ``Dictionary.encode_line`` takes."""
        return [self.symbols[token] for token in self.encode_batch([text])[0]]

    def decode(self, symbols: Iterable[str]) -> str:
        """Return the text of symbols; fairseq's own four (such as ``</s>``) and empty ones are left out.

        Raises:
            AlmaError: a symbol is not one of this tokenizer.
        """
        tokens = []
        for symbol in symbols:
            if not symbol or symbol in FAIRSEQ_SYMBOLS:
                continue
            if symbol not in self._token_of:
                raise AlmaError(f"{self.file}: {symbol!r} is no symbol of it; decode with the tokenizer that encoded")
            tokens.append(self._token_of[symbol])
        return self.decode_batch([tokens])[0]

    def decode_batch(self, texts: Sequence[list[int]]) -> list[str]:
        """Return the text of each list of tokens."""
        return self._backend.decode_batch(texts)


def find_tokenizer_file(path: Path) -> Path:
    """Return the tokenizer file that a path means: itself, or the one in this folder.

    Raises:
        AlmaError: nothing is there, or several, or a file of another kind.
    """
    if not path.is_dir():
        if path.suffix not in (".json", ".model"):
            raise AlmaError(f"{path}: a tokenizer.json or a sentencepiece .model is needed; give one, or its folder")
        if not path.is_file():
            raise AlmaError(f"{path}: no such file; give a tokenizer.json, a sentencepiece .model, or its folder")
        return path
    if (path / FILE_NAMES["tokenizers"]).is_file():  # a folder of transformers may have a .model too
        return path / FILE_NAMES["tokenizers"]
    found = [file for file in sorted(path.iterdir()) if file.suffix == ".model"]
    if len(found) != 1:
        names = " and ".join(file.name for file in found) or "neither a tokenizer.json nor a .model"
        raise AlmaError(f"{path}: {names} in this folder, one tokenizer is needed; give the file itself")
    return found[0]


def _num_rows(folder: Path) -> int:
    """Return the size of the vocabulary that a ``config.json`` of transformers states; 0: there is none."""
    try:
        size = json.loads((folder / "config.json").read_text(encoding="utf-8-sig")).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return 0
    return size if type(size) is int and size <= MAX_TOKENS else 0


def _dictionary_symbols(pieces: Sequence[str]) -> list[str]:
    """Spell each token so that fairseq's Dictionary keeps it apart: no white space, no repetition, none of its own."""
    taken = set(FAIRSEQ_SYMBOLS)
    symbols = []
    for number, piece in enumerate(pieces):
        if not piece or _WHITE_SPACE.search(piece) or piece in taken or piece.startswith("#fairseq:"):
            piece = f"<unit:{number}>"
        taken.add(piece)
        symbols.append(piece)
    return symbols


NUM_FAIRSEQ_SYMBOLS = 4  # fairseq's Dictionary begins with <s> <pad> </s> <unk>, so token u has id u + 4
EOS = 2


def absent_ids(symbol_ids: str) -> list[int]:
    """Return the ids of a dictionary of an imported vocabulary that stand for no token of a text.

    Args:
        symbol_ids: JSON list: for each of fairseq's four symbols the imported token (from 0) that it is, or null.

    Raises:
        AlmaError: it is no such list.
    """
    try:
        imported = msgspec.json.decode(
            symbol_ids, type=tuple[Optional[int], Optional[int], Optional[int], Optional[int]]
        )
    except msgspec.MsgspecError as error:
        raise AlmaError(f"--symbol-ids {symbol_ids[:60]!r}: needs a JSON list of four token ids or nulls") from error
    symbols = enumerate(imported)
    return [symbol if token is None else token + NUM_FAIRSEQ_SYMBOLS for symbol, token in symbols]


_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_DTYPE_CODES: dict[int, np.dtype] = {
    8: np.dtype("uint16"),
    9: np.dtype("uint32"),
    5: np.dtype("int64"),
    4: np.dtype("int32"),
}
_HEADER = struct.Struct("<9sQBQ")
_ENTRY_SIZE = 4 + 8  # bytes of a sequence in the index: how many ids it has, and where they begin


def id_dtype(vocab_size: int) -> np.dtype:
    """Return the type that fairseq chooses for a dictionary of ``vocab_size`` tokens and its own four symbols."""
    return np.dtype("uint16") if vocab_size + NUM_FAIRSEQ_SYMBOLS < 65500 else np.dtype("uint32")


class TokenFileWriter:
    """Write one token file, part by part; its files are open only while they are written.

    Args:
        prefix: path of the files without ``.bin`` and ``.idx``, which are not there yet.
        dtype: type of an id, ``uint16`` or ``uint32``.
    """

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        self.dtype = dtype
        self._prefix = prefix
        self._waiting: list[bytes] = []
        self._digest, self._size = hashlib.sha256(), 0
        self._sizes = array("i")

    def write(self, ids: bytes, sizes: np.ndarray) -> None:
        """Add sequences, which stay in memory until `flush`.

        Args:
            ids: the ids of all of them one after the other, in the bytes of ``dtype``.
            sizes: ``(num_sequences,)``: ids per sequence.
        """
        self._waiting.append(ids)
        self._sizes.frombytes(sizes.astype("=i4").tobytes())

    def flush(self) -> None:
        """Write what is in memory."""
        path = Path(f"{self._prefix}.bin")
        path.parent.mkdir(parents=True, exist_ok=True)
        with naming(path), open(path, "ab") as file:
            for content in self._waiting:
                file.write(content)
                self._digest.update(content)
                self._size += len(content)
        self._waiting = []

    def close(self) -> list[tuple[int, str]]:
        """Write the rest and the index; return size and sha256 of both files."""
        self.flush()
        code = next(code for code, dtype in _DTYPE_CODES.items() if dtype == self.dtype)
        sizes = np.frombuffer(self._sizes, "=i4") if self._sizes else np.empty(0, np.int32)
        starts = np.cumsum(sizes, dtype=np.int64)
        starts -= sizes
        starts *= self.dtype.itemsize
        header = _HEADER.pack(_MAGIC, _VERSION, code, len(sizes))
        digest, path = hashlib.sha256(), Path(f"{self._prefix}.idx")
        with naming(path), open(path, "wb") as file:
            for content in (header, sizes.astype("<i4", copy=False).data, starts.astype("<i8", copy=False).data):
                file.write(content)
                digest.update(content)
            size = file.tell()
        return [(self._size, self._digest.hexdigest()), (size, digest.hexdigest())]


class TokenFile:
    """Read one token file in place.

    Args:
        prefix: path of the files without ``.bin`` and ``.idx``.

    Attributes:
        ids: ``(num_tokens,)`` memory map of all ids.
        sizes: ``(num_sequences,)``, int32: ids per sequence.

    Raises:
        AlmaError: the index is of another format, or the token file is shorter or longer than it says.
    """

    def __init__(self, prefix: Union[str, Path]) -> None:
        idx, bin_ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        with open(idx, "rb") as file:
            header = file.read(_HEADER.size)
        magic, version, code, num_sequences = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
        if (magic, version) != (_MAGIC, _VERSION) or code not in _DTYPE_CODES:
            raise AlmaError(f"{idx}: not an index of fairseq's mmap format; prepare the stream again")
        dtype = _DTYPE_CODES[code]
        size = _HEADER.size + num_sequences * _ENTRY_SIZE
        if idx.stat().st_size != size:
            raise AlmaError(f"{idx}: {idx.stat().st_size} bytes found, {size} needed; prepare the stream again")
        self.sizes = np.fromfile(idx, dtype="<i4", count=num_sequences, offset=_HEADER.size)
        if num_sequences and self.sizes.min() < 0:
            raise AlmaError(f"{idx}: a sequence of {self.sizes.min()} ids; prepare the stream again")
        needed = int(self.sizes.sum(dtype=np.int64)) * dtype.itemsize
        found = bin_.stat().st_size
        if found != needed:
            raise AlmaError(f"{bin_}: {found} bytes found, its index needs {needed}; prepare the stream again")
        self.ids = np.memmap(bin_, dtype=dtype, mode="r") if needed else np.empty(0, dtype)

    def __len__(self) -> int:
        return len(self.sizes)
