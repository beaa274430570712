"""Tokenizers: symbols that fairseq's Dictionary distinguishes, and text that is decoded as it was encoded.

Token files: the same bytes as fairseq's own reader and writer.
"""

import numpy as np
import pytest

from fairseq_alma.data import tokens
from fairseq_alma.data.tokens import StreamTokenizer, TokenFile, TokenFileWriter, find_tokenizer_file, id_dtype
from fairseq_alma.errors import AlmaError
from tests.data.sentencepiece_models import train_sentencepiece

TEXT = "The cat's  whiskers,\n\n\tthe “dog” – naïve 北京 🙂 </s> <unk> #fairseq:overwrite 1990s\u2028\u00a0end"
TRAINING = ["the cat and the dog are in the house " * 20, "a naïve cat, the dog's house – 北京 " * 20]


@pytest.fixture(scope="module", params=["tokenizers", "sentencepiece"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "tokenizers":
        (folder / "tokenizer.json").write_bytes(tokens.train_tokenizer([TRAINING], 320))
    else:
        train_sentencepiece(folder / "a.model", TRAINING)
    return folder


def test_decode_ignores_fairseqs_own_symbols_and_refuses_unknown_ones(folder):
    tokenizer = StreamTokenizer(folder)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.decode(["<s>", *tokenizer.encode("the cat"), "</s>", "<pad>", ""]) == "the cat"
    with pytest.raises(AlmaError, match="no symbol 'no-such-symbol'"):
        tokenizer.decode(["no-such-symbol"])


def test_fairseq_dictionary_gives_token_u_the_id_u_plus_4(folder, tmp_path):
    from fairseq.data import Dictionary

    tokenizer = StreamTokenizer(folder)
    (tmp_path / "dict.txt").write_text("".join(f"{symbol} 1\n" for symbol in tokenizer.symbols))
    dictionary = Dictionary.load(str(tmp_path / "dict.txt"))
    assert dictionary.symbols[4:] == tokenizer.symbols
    ids = dictionary.encode_line(" ".join(tokenizer.encode(TEXT)), add_if_not_exist=False, append_eos=True)
    assert ids.tolist() == [unit + 4 for unit in tokenizer.encode_batch([TEXT])[0]] + [2]
    assert tokenizer.decode(dictionary.string(ids).split()) == TEXT


@pytest.mark.parametrize(
    ("vocabulary", "expected"),
    [
        (
            {"</s>": 0, "a b": 1, "": 2, "c": 3, "\u2003": 4, "d": 7},
            ["<unit:0>", "<unit:1>", "<unit:2>", "c", "<unit:4>", "<unit:5>", "<unit:6>", "d"],
        ),
        ({"<unit:2>": 0, "c": 1, "a b": 2}, ["<unit:2>", "c", "<<unit:2>>"]),
        ({"a b": 0, "c": 1, "<unit:0>": 2, "<<unit:0>>": 3}, ["<<<unit:0>>>", "c", "<unit:0>", "<<unit:0>>"]),
    ],
    ids=["all", "before", "after"],
)
def test_pieces_that_a_dictionary_cannot_hold_get_names_that_no_other_token_has(tmp_path, vocabulary, expected):
    from fairseq.data import Dictionary
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel(vocabulary, unk_token="c")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = StreamTokenizer(tmp_path)
    assert tokenizer.symbols == expected
    (tmp_path / "dict.txt").write_text("".join(f"{symbol} 1\n" for symbol in tokenizer.symbols))
    assert Dictionary.load(str(tmp_path / "dict.txt")).symbols[4:] == expected  # fairseq refuses duplicate symbols
    assert tokenizer.decode([expected[0]]) == tokenizer.decode_batch([[0]])[0]


def test_a_published_tokenizer_does_not_truncate_pad_or_add_tokens_and_may_have_a_byte_order_mark(folder, tmp_path):
    from tokenizers import Tokenizer

    if not (folder / "tokenizer.json").exists():
        pytest.skip("about tokenizer.json only")
    published = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain = StreamTokenizer(folder).encode_batch([TEXT, "the"])
    published.add_special_tokens(["<unk>"])
    published.enable_truncation(3)
    published.enable_padding(length=64)
    (tmp_path / "tokenizer.json").write_text("\ufeff" + published.to_str())
    assert StreamTokenizer(tmp_path).encode_batch([TEXT, "the"]) == plain


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "the package tokenizers cannot load this file"),
        ("broken.model", "x", "the package sentencepiece cannot load this file"),
        ("notes.txt", "x", "expected a tokenizer.json or a SentencePiece .model"),
    ],
)
def test_a_file_that_is_not_a_tokenizer_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(AlmaError, match=message):
        StreamTokenizer(tmp_path / name)


def test_a_folder_has_a_tokenizer_json_or_one_model(tmp_path):
    with pytest.raises(AlmaError, match=r"found neither a tokenizer\.json nor a \.model"):
        find_tokenizer_file(tmp_path)
    (tmp_path / "a.model").touch()
    assert find_tokenizer_file(tmp_path) == tmp_path / "a.model"
    (tmp_path / "b.model").touch()
    with pytest.raises(AlmaError, match=r"expected one tokenizer in the folder, found a\.model and b\.model"):
        find_tokenizer_file(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    assert find_tokenizer_file(tmp_path) == tmp_path / "tokenizer.json"


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files_equal_those_of_fairseq_byte_for_byte_and_are_read_again(tmp_path, dtype):
    import torch
    from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

    sequences = [[4, 5, 2], [2], [65000, 7, 8, 9, 2]]
    writer = TokenFileWriter(tmp_path, "ours", np.dtype(dtype))
    builder = MMapIndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.dtype(dtype).type)
    for part in (sequences[:2], sequences[2:]):
        writer.write(np.array(sum(part, []), dtype).tobytes(), np.array([*map(len, part)]))  # noqa: RUF017
        writer.flush()
    writer.close()
    for sequence in sequences:
        builder.add_item(torch.tensor(sequence))
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()
    file = TokenFile(tmp_path / "ours")
    assert file.sizes.tolist() == [3, 1, 5] and file.ids.tolist() == [4, 5, 2, 2, 65000, 7, 8, 9, 2]


@pytest.mark.parametrize("vocab_size", [1, 65495, 65496, 100_000])
def test_the_id_type_equals_the_choice_of_fairseq(vocab_size):
    from fairseq.data.indexed_dataset import best_fitting_int_dtype

    assert id_dtype(vocab_size) == np.dtype(best_fitting_int_dtype(vocab_size + 4))
