"""The fast encoder: the same tokens as the tokenizer, on text of every kind."""

import random

import numpy as np
import pytest

from fairseq_alma.data.tokens import DocumentEncoder, StreamTokenizer, train_tokenizer

PIECES = [
    *"abcXYZ019 \n\t.,;:!?'\"()[]{}-_/\\@#$%^&*+=<>|~`",
    *"éßñ北京が한اя²Ⅷ½٣—–…’“”«»€™\u00a0\u2003\u3000\u2028\u200b\u180e\ufeff\u0301🙂\x00\x07\x1b\x1c\x1f\x7f\x85",
    *["  ", "   ", "\n\n", "\r\n", " \n", "\n ", "'s", "'t", "'re", "'ll", "n't", "'S", "''", " '", "the", " the"],
    *["1990s", "U.S.", "e.g.", "co-op", "rock'n'roll", "O'Neil", "<|end|>", "</s>", "'é", "s—all", "don'tя"],
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Byte-level BPE with merges of the odd pieces too."""
    folder = tmp_path_factory.mktemp("tokenizer")
    generator = random.Random(0)
    text = ["".join(generator.choices(PIECES, k=2000)) for _ in range(20)]
    text += ["the cat's 1990s rock'n'roll isn't over, they're (co-op) said. " * 50]
    (folder / "tokenizer.json").write_bytes(train_tokenizer([text], 2000))
    return StreamTokenizer(folder)


def reference(tokenizer, documents):
    """Return the tokens of the tokenizer itself, in the bytes of a token file."""
    units = tokenizer.encode_batch(documents)
    return [(np.array([*(unit + 4 for unit in ids), 2])).astype(np.uint16).tobytes() for ids in units]


def test_random_text_of_odd_pieces_is_encoded_as_by_the_tokenizer(tokenizer):
    generator = random.Random(1)
    documents = ["".join(generator.choices(PIECES, k=generator.randrange(1, 60))) for _ in range(4_000)]
    assert DocumentEncoder(tokenizer, 10_000).encode(documents) == reference(tokenizer, documents)


def test_training_cuts_words_of_more_than_1000_characters(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(train_tokenizer([["x" * 5000 + " " * 5000 + "y"]], 300))
    assert max(map(len, StreamTokenizer(tmp_path).pieces)) <= 1000


@pytest.mark.parametrize("cache_size", [0, 1, 50])
def test_a_full_cache_changes_no_token_and_stays_small(tokenizer, cache_size):
    encoder = DocumentEncoder(tokenizer, cache_size)
    documents = [f"the cat number {number} isn't here" for number in range(300)]
    for start in range(0, 300, 10):
        part = documents[start : start + 10]
        assert encoder.encode(part) == reference(tokenizer, part)
    assert len(encoder._cache) <= cache_size + 100


def test_added_tokens_are_found_in_the_text_as_the_tokenizer_finds_them(tokenizer, tmp_path):
    from tokenizers import AddedToken, Tokenizer

    extended = Tokenizer.from_file(str(tokenizer.file))
    extended.add_tokens([AddedToken("the cat", normalized=False)])
    extended.save(str(tmp_path / "tokenizer.json"))
    with_added, documents = StreamTokenizer(tmp_path), ["see the cat run", "see the dog run"]
    encoded = DocumentEncoder(with_added, 100).encode(documents)
    assert encoded == reference(with_added, documents)
    assert encoded[0] != reference(tokenizer, documents)[0]


def test_text_for_a_tokenizer_with_another_rule_is_not_split(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    rule = Tokenizer(models.WordLevel({"[unk]": 0, "cat": 1, "!": 2}, unk_token="[unk]"))
    rule.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()])
    rule.save(str(tmp_path / "tokenizer.json"))
    tokenizer, documents = StreamTokenizer(tmp_path), ["cat !! cat", "dog"]
    assert DocumentEncoder(tokenizer, 100).encode(documents) == reference(tokenizer, documents)
