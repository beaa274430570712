"""Near-duplicates are left out but for one, whatever the order of the input; held-out text is never chosen by them."""

import pytest

pytest.importorskip("datasketch")

from data_prep.text import near_copies
from data_prep.text.command import main
from data_prep.text.near_copies import PARAMETERS, bands_of
from fairseq_alma.data.stream import Stream
from fairseq_alma.errors import AlmaError
from tests.data_prep.test_command import create, files_of, held_out_texts, make_documents, run, small_pieces, texts_of

__all__ = ["small_pieces"]
NEAR = ("--near-duplicates", "minhash")
DOCUMENTS = [text for text in make_documents(500) if len(text.split()) > 20]
COPIES = [f"{text} ." for text in DOCUMENTS]


def plain(texts):
    return [text.removesuffix(" .") for text in texts]


def trained(stream):
    return [text for t in range(stream.num_megabatches) for text in texts_of(stream, f"megabatch-{t:03d}/train")]


@pytest.fixture
def copied(tmp_path):
    path = tmp_path / "copied.txt"
    path.write_text("\n\n".join(DOCUMENTS + COPIES))
    return path


def test_one_of_several_near_duplicates_stays_and_none_of_those_that_are_held_out(copied, tmp_path, capsys):
    kept = create(copied, tmp_path / "kept", "--no-decontaminate")
    stream = create(copied, tmp_path / "stream", "--no-decontaminate", *NEAR)
    assert held_out_texts(stream) == held_out_texts(kept)
    assert len(trained(kept)) + len(held_out_texts(kept)) == 2 * len(DOCUMENTS)
    of_training = plain(trained(stream))
    assert len({*of_training}) == len(of_training)
    assert {*of_training} == {*DOCUMENTS} - {*plain(held_out_texts(stream))}
    said = stream.history[0]["near_duplicates"]
    assert said["documents"] == len(trained(kept)) - len(of_training) > 100
    before, after = (sum(len(text.split()) for text in trained(each)) for each in (kept, stream))
    assert said["words"] == before - after
    assert {**PARAMETERS, **said} == said
    assert f"{said['documents']} documents ({said['words']:,} words) left out as near-dup" in capsys.readouterr().out
    sizes = [stream.megabatch(t).num_words for t in range(3)]
    assert max(sizes) - min(sizes) < 130


def test_neither_order_of_input_nor_workers_nor_pieces_decide_who_stays(copied, tmp_path, request):
    one = create(copied, tmp_path / "one", *NEAR)
    request.getfixturevalue("small_pieces")
    command = [str(copied), "--out", str(tmp_path / "two"), "--megabatches", "3", "--vocab-size", "300", *NEAR]
    assert main([*command, "--workers", "2"]) == 0
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    (tmp_path / "turned.txt").write_text("\n\n".join((DOCUMENTS + COPIES)[::-1]))
    turned = create(tmp_path / "turned.txt", tmp_path / "turned", *NEAR)
    assert sorted(trained(turned)) == sorted(trained(one))
    assert turned.history[0]["near_duplicates"] == one.history[0]["near_duplicates"]


def test_a_document_that_is_left_out_for_what_it_shares_with_the_test_stands_for_no_other(copied, tmp_path):
    stream = create(copied, tmp_path / "stream", *NEAR)
    assert stream.history[0]["num_contaminated"] > 50
    assert {*plain(trained(stream))} == {*DOCUMENTS} - {*plain(held_out_texts(stream))}


def test_what_is_appended_is_compared_with_what_is_there(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(DOCUMENTS))
    new = [text for text in make_documents(200, seed=5) if len(text.split()) > 20]
    (tmp_path / "more.txt").write_text("\n\n".join(new + COPIES))
    stream = create(tmp_path / "text.txt", tmp_path / "stream", "--no-decontaminate")
    append = (tmp_path / "more.txt", "--out", stream.root, "--append", "--megabatches", 1, "--no-decontaminate")
    assert run(*append, *NEAR) == 0
    longer = Stream.open(stream.root)
    assert sorted(texts_of(longer, "megabatch-003/train")) == sorted(new)
    assert longer.history[1]["near_duplicates"]["documents"] == len(COPIES)


def test_bands_are_those_of_the_library_for_four_fifths_in_common():
    from datasketch import MinHashLSH

    lsh = MinHashLSH(threshold=0.8, num_perm=PARAMETERS["permutations"])
    assert (lsh.b, lsh.r) == (PARAMETERS["bands"], PARAMETERS["rows"])
    owners, bands = bands_of(["one", "...", "ONE!", " ".join(map(str, range(50)))])
    assert owners.tolist() == [0, 2, 3]
    assert (bands[0] == bands[1]).all() and not (bands[0] == bands[2]).any()


def test_without_the_library_one_line_says_what_to_install(copied, tmp_path, monkeypatch):
    monkeypatch.setattr(near_copies, "find_spec", lambda name: None)
    with pytest.raises(AlmaError, match=r"^--near-duplicates minhash: datasketch is not installed; pip install"):
        create(copied, tmp_path / "stream", *NEAR)
    assert not (tmp_path / "stream").exists()


def test_equal_documents_cannot_be_kept_where_near_ones_are_left_out(copied, tmp_path, capsys):
    with pytest.raises(SystemExit):
        create(copied, tmp_path / "stream", *NEAR, "--keep-duplicates")
    assert "--near-duplicates leaves out what --keep-duplicates keeps" in capsys.readouterr().err
