"""``alma-ensemble``: its files, its errors, and stock commands with its checkpoint."""

import hashlib
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.models import FairseqLanguageModel

from fairseq_alma.cli.ensemble import main
from fairseq_alma.data.stream import Stream
from tests import scripts
from tests.models.ensembles import load, save_member, switch_config
from tests.scripts import run_script, usage_error
from tests.text.models import transformer_config
from tests.text.stock_commands import TOKENS_PER_SAMPLE

SIZES = {"decoder_layers": 2, "decoder_embed_dim": 8, "decoder_ffn_embed_dim": 16}

refused = partial(scripts.refused, main)


@pytest.fixture
def members(tmp_path):
    return [str(save_member(tmp_path / f"m{seed}" / "a.pt", switch_config(**SIZES), seed)) for seed in (0, 1)]


def test_members_are_named_by_relative_path_checksum_and_weight(members, tmp_path, capsys):
    assert main([*members, "--out", f"{tmp_path}/e/E.pt", "--weights", "1", "3"]) == 0
    model = torch.load(tmp_path / "e" / "E.pt", weights_only=True)["cfg"]["model"]
    assert [entry["path"] for entry in model["members"]] == ["../m0/a.pt", "../m1/a.pt"]
    assert [entry["weight"] for entry in model["members"]] == [0.25, 0.75]
    assert model["members"][0]["sha256"] == hashlib.sha256((tmp_path / "m0" / "a.pt").read_bytes()).hexdigest()
    assert "ensemble of 2 models, weights in the members' files" in capsys.readouterr().out


def test_average_needs_one_checkpoint_with_averaged_weights(members, tmp_path, capsys):
    options = ["--average", "--out", f"{tmp_path}/E.pt"]
    assert "--average requires one CKPT (found 2)" in usage_error(capsys, main, [*members, *options])
    assert "on images, use checkpoint_average.pt" in refused(tmp_path, members[0], *options)


def test_an_embedded_ensemble_needs_no_other_file(members, tmp_path):
    main([*members, "--embed", "--out", f"{tmp_path}/E.pt"])
    tokens = torch.tensor([[5, 6, 7]])
    want = load(tmp_path / "E.pt")(tokens)[0]
    for path in members:
        shutil.move(path, f"{path}.away")
    torch.testing.assert_close(load(tmp_path / "E.pt")(tokens)[0], want)


def test_joining_changes_no_member_and_force_replaces_the_destination(members, tmp_path):
    before = [Path(path).read_bytes() for path in members]
    out = f"{tmp_path}/E.pt"
    main([*members, "--out", out])
    assert "exists already" in refused(tmp_path, *members, "--out", out)
    main([members[0], "--out", out, "--force"])
    assert len(torch.load(out, weights_only=True)["cfg"]["model"]["members"]) == 1
    assert [Path(path).read_bytes() for path in members] == before


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        (["1"], "expected 2 weights, found 1"),
        (["1", "-1"], "--weights -1: expected a number of at least 0"),
        (["0", "0"], "expected at least one positive weight, found only 0"),
        (["1", "x"], "--weights x: expected a number"),
    ],
)
def test_invalid_weights_are_a_usage_error(members, tmp_path, capsys, weights, named):
    assert named in usage_error(capsys, main, [*members, "--out", f"{tmp_path}/E.pt", "--weights", *weights])
    assert not (tmp_path / "E.pt").exists()


def test_members_that_do_not_match_are_reported_in_one_line(members, tmp_path):
    out = ["--out", f"{tmp_path}/E.pt"]
    other = str(save_member(tmp_path / "other.pt", switch_config(**SIZES), 2, dictionary="e" * 64))
    assert "as in previous members, found eeee" in refused(tmp_path, members[0], other, *out)
    larger = str(save_member(tmp_path / "larger.pt", switch_config(**SIZES), 2, dictionary=None, num_tokens=50))
    assert "members, found vocab_size 54;" in refused(tmp_path, members[0], larger, *out)
    (tmp_path / "text.pt").write_text("no checkpoint")
    assert "text.pt: not a checkpoint" in refused(tmp_path, members[0], f"{tmp_path}/text.pt", *out)
    assert "none.pt: expected a file, found nothing" in refused(tmp_path, members[0], f"{tmp_path}/none.pt", *out)
    torch.save({"cfg": {"model": {"_name": "mlp"}}, "model": {}}, tmp_path / "mlp.pt")
    assert "mlp.pt: expected architecture alma_…" in refused(tmp_path, members[0], f"{tmp_path}/mlp.pt", *out)


def test_a_member_without_a_known_dictionary_may_join(members, tmp_path):
    stock = str(save_member(tmp_path / "stock.pt", switch_config(**SIZES), 2, dictionary=None))
    main([stock, members[0], "--out", f"{tmp_path}/E.pt"])
    assert torch.load(tmp_path / "E.pt", weights_only=True)["task_state"] == {"alma_dictionary_sha256": "d" * 64}


def test_an_ensemble_contains_neither_itself_nor_another_one(members, tmp_path):
    assert "a member of the ensemble" in refused(tmp_path, *members, "--out", members[1], "--force", "--embed")
    main([members[0], "--out", f"{tmp_path}/E.pt"])
    line = refused(tmp_path, f"{tmp_path}/E.pt", members[1], "--out", f"{tmp_path}/F.pt")
    assert "E.pt: an ensemble cannot be a member" in line


@pytest.fixture(scope="module")
def joined(trained, tmp_path_factory):
    """Return a trained alma_switch_lm, an untrained alma_transformer_lm, and their ensemble."""
    folder = tmp_path_factory.mktemp("ensemble")
    shutil.copy(trained.checkpoint, folder / "a.pt")
    stream = Stream.open(trained.stream)
    num_tokens = len((trained.stream / "dict.txt").read_text().splitlines())
    config = {**transformer_config(), "tokens_per_sample": TOKENS_PER_SAMPLE}
    save_member(folder / "b.pt", config, 3, stream.dictionary_sha256, num_tokens)
    main([f"{folder}/a.pt", f"{folder}/b.pt", "--out", f"{folder}/E.pt"])
    return SimpleNamespace(folder=folder, stream=trained.stream, num_tokens=num_tokens, path=folder / "E.pt")


def test_fairseq_interactive_writes_text(joined, checkout):
    words = ["fairseq-interactive", str(joined.stream), "--user-dir", "fairseq_alma", "--task", "alma_lm", "--cpu"]
    words += ["--path", str(joined.path), "--beam", "1", "--sampling", "--nbest", "1", "--max-len-b", "8"]
    words += ["--buffer-size", "2", "--batch-size", "2"]
    done = run_script(words, cwd=checkout, typed="the wind\nthe old river\n")
    texts = re.findall(r"^D-\d\t\S+\t(.*)$", done.stdout, re.MULTILINE)
    assert len(texts) == 2, done.stderr
    assert texts[0].startswith("the wind") and texts[1].startswith("the old river")


def test_the_hub_interface_samples_from_an_ensemble(joined):
    options = {"data_name_or_path": str(joined.stream), "bpe": "alma", "path": str(joined.path)}
    hub = FairseqLanguageModel.from_pretrained(str(joined.folder), "E.pt", **options)
    assert hub.sample("the wind", beam=2, max_len_b=8).startswith("the wind")
    assert hub.score("the old river")["positional_scores"].isfinite().all()
