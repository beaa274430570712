"""N-grams of words: what counts as shared, and how much of a test set a mega-batch holds."""

import random

import numpy as np

from fairseq_alma.data.ngrams import NgramHasher, NgramSet, distinct


def plainly(documents: list[str], size: int) -> list[tuple[int, int, tuple[str, ...]]]:
    """The same by the rule's words: document, first word, words; a short document is one n-gram."""
    found = []
    for number, document in enumerate(documents):
        spaced = "".join(each if each.isalnum() or ord(each) > 127 else " " for each in document.lower())
        words = spaced.split(" ")
        words = [word for word in words if word]
        last = max(len(words) - size, 0) if words else -1
        found += [(number, start, tuple(words[start : start + size])) for start in range(last + 1)]
    return found


def test_ngrams_are_those_of_the_rule_and_equal_where_their_words_are():
    generator = random.Random(1)
    letters = ["a", "b", "Ab", "ä", "北", "x1", "B", "İ", " ", " ", ". ", "\n", "-", "\0", "a" * 5000]
    documents = ["".join(generator.choices(letters, k=generator.randrange(40))) for _ in range(300)] + ["", "…!", "A"]
    for size in (1, 3, 13):
        hasher = NgramHasher(size)
        ngrams, expected = hasher(documents), plainly(documents, size)
        assert [*zip(ngrams.documents.tolist(), ngrams.starts.tolist(), strict=True)] == [one[:2] for one in expected]
        assert [hasher.spell(documents[number], start) for number, start, _ in expected] == [
            " ".join(words) for _, _, words in expected
        ]
        words_of = dict(zip(ngrams.hashes.tolist(), (one[2] for one in expected), strict=True))
        assert len(words_of) == len({one[2] for one in expected})
        assert all(words_of[key] == one[2] for key, one in zip(ngrams.hashes.tolist(), expected, strict=True))


def test_the_numbers_do_not_depend_on_what_stands_beside(monkeypatch):
    documents = [" ".join(random.Random(number).choices("abcdefgh", k=30)) for number in range(50)]
    together = NgramHasher(4)(documents).hashes
    monkeypatch.setattr("fairseq_alma.data.ngrams._BYTES_AT_ONCE", 16)
    apart = np.concatenate([NgramHasher(4)([document]).hashes for document in documents])
    assert (together == apart).all()
    assert len(NgramHasher(4)([]).hashes) == 0


def test_a_set_finds_what_is_in_it_and_nothing_else():
    numbers = np.random.default_rng(0).integers(0, 2**64, 4000, dtype=np.uint64)
    known = distinct([numbers[:2000], numbers[500:1000]])
    found, places = NgramSet(known).find(numbers)
    assert found.tolist() == [*range(2000)]
    assert (known[places] == numbers[:2000]).all()
    assert len(NgramSet(distinct([])).find(numbers)[0]) == 0
