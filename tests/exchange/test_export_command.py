"""``alma-export``: what it refuses, in one line, with nothing left behind."""

import shutil
from datetime import UTC, datetime
from functools import partial

from fairseq_alma.checkpoints.checkpoint_file import read_checkpoint, write_checkpoint
from fairseq_alma.cli.export import main
from fairseq_alma.data.stream import Stream
from fairseq_alma.exchange import model_folder
from tests import scripts
from tests.models.ensembles import save_member, transformer_config

refused = partial(scripts.refused, main)


def altered(path, out, **changes):
    checkpoint = read_checkpoint(path, mmap=False)
    for name, value in changes.items():
        checkpoint[name] = {**checkpoint[name], **value}
    write_checkpoint(checkpoint, out)
    return out


def test_what_stands_at_out_is_left_alone(checkpoints, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert "exists and is not empty" in refused(tmp_path, checkpoints["switch"], "--out", tmp_path / "full")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    assert "a file or a link" in refused(tmp_path, checkpoints["switch"], "--out", tmp_path / "link")
    assert "a file or a link" in refused(tmp_path, checkpoints["switch"], "--out", tmp_path / "full" / "mine.txt")


def test_another_dictionary_or_stream_is_refused(checkpoints, stream, sentencepiece_stream, tmp_path):
    path, out = checkpoints["switch"], ["--out", tmp_path / "out"]
    line = refused(tmp_path, path, *out, "--stream", sentencepiece_stream)
    assert "trained with another tokenizer" in line
    other = altered(path, tmp_path / "b.pt", task_state={"alma_dictionary_sha256": "e" * 64})
    assert "trained with another tokenizer (dict.txt eeee" in refused(tmp_path, other, *out)
    gone = altered(path, tmp_path / "c.pt", cfg={"task": {"data": "/nowhere"}})
    assert "trained on /nowhere, which is not there any more; give --stream" in refused(tmp_path, gone, *out)
    unknown = altered(path, tmp_path / "d.pt", cfg={"task": {}})
    assert "does not say which stream" in refused(tmp_path, unknown, *out)
    assert "this is not a stream" in refused(tmp_path, path, *out, "--stream", tmp_path)
    changed = tmp_path / "changed"
    shutil.copytree(stream, changed)
    (changed / "tokenizer" / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in refused(tmp_path, path, *out, "--stream", changed)


def test_what_is_no_model_for_a_folder_is_refused(checkpoints, tmp_path):
    out = ["--out", tmp_path / "out"]
    stock = save_member(tmp_path / "stock.pt", transformer_config(), 0)
    line = refused(tmp_path, stock, *out)
    assert "architecture transformer_lm is no language model" in line
    (tmp_path / "text.pt").write_text("no checkpoint")
    assert "text.pt: no checkpoint" in refused(tmp_path, tmp_path / "text.pt", *out)
    assert "no such checkpoint file" in refused(tmp_path, tmp_path / "none.pt", *out)


def test_nothing_is_left_of_an_export_that_fails_halfway(checkpoints, tmp_path, monkeypatch):
    def fails(*arguments):
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr(model_folder, "write_tensors", fails)
    assert "the disk is full" in refused(tmp_path, checkpoints["switch"], "--out", tmp_path / "out")


def test_the_card_says_what_the_model_is_and_of_which_text(checkpoints, stream, tmp_path):
    main([str(checkpoints["switch"]), "--out", str(tmp_path / "out")])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| experts per Switch layer | 4 |" in card and "not part of a run of alma-stream" in card
    changed = datetime.fromtimestamp(checkpoints["switch"].stat().st_mtime, UTC)
    assert f"| weights of | {changed:%Y-%m-%d} |" in card and "not by llama.cpp (GGUF) or vLLM" in card
    num_words = sum(Stream.open(stream).megabatch(number).num_words for number in range(2))
    assert f"{num_words:,} words" in card and "`text.txt` |" in card and "of the same text, held out |" in card
