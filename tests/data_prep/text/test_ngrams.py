"""Equal documents, written in eight ways, and shared n-grams."""

import random
import unicodedata

import numpy as np
import pytest

from data_prep.text.assignment import HeldOutNgrams, distinct_of_each, document_hashes, ngram_at, ngrams_of

TEXT = "“Don't—ever,” said Zoë’s uncle in 1999, as the naïve café owner of Ångström street counted 12 coins; he left"
WAYS = {
    "no-break spaces": lambda text: text.replace(" ", "\u00a0"),
    "straight quotes and dashes": lambda text: text.translate(str.maketrans("“”’—", '""\'-')),
    "zero-width characters": lambda text: "\u200b".join(text),
    "decomposed accents": lambda text: unicodedata.normalize("NFD", text),
    "capitals": str.upper,
    "full-width forms": lambda text: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text),
    "soft hyphens and a byte order mark": lambda text: "\ufeff" + text.replace("a", "a\u00ad"),
    "white space and punctuation": lambda text: text.replace(" ", " \u3000\n").replace(",", " … "),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_text_written_in_another_way_is_the_same_text(way):
    others = [TEXT.replace("coins", word) for word in ("coin", "cents")]
    written = WAYS[way](TEXT)
    assert written != TEXT
    hashes = document_hashes([TEXT, written, *others])
    assert hashes[0] == hashes[1] and len({*hashes.tolist()}) == 3
    assert np.array_equal(ngrams_of([TEXT], 13).hashes, ngrams_of([written], 13).hashes)


def test_scripts_keep_their_vowels_and_text_without_letters_is_compared_by_its_characters():
    texts = ["कि", "का", "ก็", "กิ", "🙂", "🙂🙂", "…", "北京", "北 京"]
    assert len({*document_hashes(texts).tolist()}) == len(texts) - 1  # the last two have equal letters
    assert ngrams_of(["कि का"], 3).documents.tolist() == [0]
    assert ngram_at("कि का", 0, 3) == "कि का"
    assert ngrams_of(["東京、タワー7階で", "京タワ"], 3).documents.tolist() == [0] * 6 + [1]


def plainly(documents: list[str], size: int) -> list[tuple[int, int, tuple[str, ...]]]:
    """Return document, first word and words of each n-gram; a short document is one n-gram."""
    found = []
    for number, document in enumerate(documents):
        folded = unicodedata.normalize("NFKC", document).casefold()
        kinds = [unicodedata.category(each)[0] for each in folded]
        folded = [f" {each} " if each in "北ก" else each for each in folded]
        words = "".join(each if kind in "LNM" else " " for each, kind in zip(folded, kinds, strict=True)).split()
        last = max(len(words) - size, 0) if words else -1
        found += [(number, start, tuple(words[start : start + size])) for start in range(last + 1)]
    return found


def test_ngrams_follow_the_rule_and_are_equal_if_their_words_are():
    generator = random.Random(1)
    letters = ["a", "b", "Ab", "ä", "北", "ก", "x1", "B", "İ", " ", " ", ". ", "\n", "-", "\0", "a" * 5000]
    documents = ["".join(generator.choices(letters, k=generator.randrange(40))) for _ in range(200)] + ["", "…!", "A"]
    for size in (1, 3, 13):
        ngrams, expected = ngrams_of(documents, size), plainly(documents, size)
        assert [*zip(ngrams.documents.tolist(), ngrams.starts.tolist(), strict=True)] == [one[:2] for one in expected]
        found = [ngram_at(documents[number], start, size) for number, start, _ in expected[:300]]
        assert found == [" ".join(words) for _, _, words in expected[:300]]
        words_of = dict(zip(ngrams.hashes.tolist(), (one[2] for one in expected), strict=True))
        assert len(words_of) == len({one[2] for one in expected})
        assert all(words_of[key] == one[2] for key, one in zip(ngrams.hashes.tolist(), expected, strict=True))


def test_hashes_do_not_depend_on_the_other_documents(monkeypatch):
    documents = [" ".join(random.Random(number).choices("abcdéfgh", k=30)) for number in range(50)] + ["plain text"]
    together = ngrams_of(documents, 4).hashes
    monkeypatch.setattr("data_prep.text.assignment._LETTERS_AT_ONCE", 16)
    assert np.array_equal(together, np.concatenate([ngrams_of([document], 4).hashes for document in documents]))
    single = np.concatenate([document_hashes([document]) for document in documents])
    assert np.array_equal(document_hashes(documents), single)
    assert len(ngrams_of([], 4).hashes) == len(document_hashes([])) == 0


def test_a_document_repeats_held_out_text_by_its_share_and_licences_count_only_if_it_has_little_else():
    generator = random.Random(2)
    licence, quote, *texts = (" ".join(generator.choices("abcdefghij", k=k)) for k in (40, 40, 400, 400, 400, 900))
    held_out = [f"{licence} {text}" for text in texts[:3]] + [f"{texts[3]} {quote}", quote, "few words"]
    own = [" ".join(generator.choices("klmnopqrst", k=k)) for k in (40, 400, 5000, 5000)]
    known = HeldOutNgrams.of(distinct_of_each(ngrams_of(held_out, 13), len(held_out)))
    trained = [f"{licence} {own[0]}", f"{own[1]} {' '.join(texts[0].split()[:30])}", f"{own[2]} {quote} {own[1]}"]
    trained += ["", f"{own[3]} {' '.join(texts[1].split()[:25])}", f"{own[0]} {quote}", "few words", "other words"]
    trained += [f"{own[0]} {texts[3][:50]} " * 30, f"{licence} in 1999"]
    copies, starts = known.find_copies(ngrams_of(trained, 13), np.ones(len(known.hashes), bool))
    # 30 of 400 words are 18 of 428 n-grams: less than 5 %. Two held-out documents contain the complete quote.
    assert copies.tolist() == [2, 5, 6, 8, 9] and starts.tolist() == [5000, 40, 0, 40, 0]
    for held_out_ngrams, documents in ((HeldOutNgrams.of([]), trained), (known, [])):
        found = held_out_ngrams.find_copies(ngrams_of(documents, 13), np.ones(len(held_out_ngrams.hashes), bool))
        assert [*map(len, found)] == [0, 0]
    # All n-grams are in many training documents: only documents that have little else are copies.
    copies, _ = known.find_copies(ngrams_of([*trained, f"{texts[3]} {own[0]}"], 13), np.zeros(len(known.hashes), bool))
    assert copies.tolist() == [6, 9, 10]
