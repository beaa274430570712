"""``alma-ensemble``: what it writes, what it refuses, and that the stock commands take its checkpoint."""

import hashlib
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from fairseq.models import FairseqLanguageModel

from fairseq_alma.cli.ensemble import main
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import TokenFile
from tests import scripts
from tests.kills.learners import write_text
from tests.models.ensembles import load, save_member, switch_config
from tests.scripts import run_script, usage_error

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
    assert "an ensemble of 2, referring to their files" in capsys.readouterr().out


def test_an_average_goes_with_one_checkpoint_that_has_one(members, tmp_path, capsys):
    assert "--average: takes one CKPT" in usage_error(
        capsys, main, [*members, "--average", "--out", f"{tmp_path}/E.pt"]
    )
    assert "has no averaged weights" in refused(tmp_path, members[0], "--average", "--out", f"{tmp_path}/E.pt")


def test_an_embedded_ensemble_needs_no_other_file(members, tmp_path):
    main([*members, "--embed", "--out", f"{tmp_path}/E.pt"])
    tokens = torch.tensor([[5, 6, 7]])
    want = load(tmp_path / "E.pt")(tokens)[0]
    for path in members:
        shutil.move(path, f"{path}.away")
    torch.testing.assert_close(load(tmp_path / "E.pt")(tokens)[0], want)


def test_the_source_of_an_ensemble_stays_as_it_is_and_force_replaces_the_destination(members, tmp_path):
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
        (["1"], "1 given, 2 members"),
        (["1", "-1"], "--weights -1: a number of at least 0"),
        (["nan", "1"], "--weights nan: a number is needed"),
        (["inf", "1"], "--weights inf: a number of at most 1e+30"),
        (["0", "0"], "at least one must be greater than 0"),
        (["1", "x"], "--weights x: a number is needed"),
    ],
)
def test_weights_that_cannot_be_are_a_usage_error(members, tmp_path, capsys, weights, named):
    assert named in usage_error(capsys, main, [*members, "--out", f"{tmp_path}/E.pt", "--weights", *weights])
    assert not (tmp_path / "E.pt").exists()


def test_members_that_do_not_fit_are_named_in_one_line(members, tmp_path):
    out = ["--out", f"{tmp_path}/E.pt"]
    other = str(save_member(tmp_path / "other.pt", switch_config(**SIZES), 2, dictionary="e" * 64))
    assert "other.pt: trained with another dictionary (eeee" in refused(tmp_path, members[0], other, *out)
    larger = str(save_member(tmp_path / "larger.pt", switch_config(**SIZES), 2, dictionary=None, num_tokens=50))
    assert "larger.pt: a vocabulary of 54 tokens" in refused(tmp_path, members[0], larger, *out)
    (tmp_path / "text.pt").write_text("no checkpoint")
    assert "text.pt: no checkpoint" in refused(tmp_path, members[0], f"{tmp_path}/text.pt", *out)
    assert "none.pt: no such checkpoint file" in refused(tmp_path, members[0], f"{tmp_path}/none.pt", *out)
    torch.save({"cfg": {"model": {"_name": "mlp"}}, "model": {}}, tmp_path / "mlp.pt")
    assert "mlp.pt: architecture mlp" in refused(tmp_path, members[0], f"{tmp_path}/mlp.pt", *out)


def test_a_member_without_a_known_dictionary_may_join(members, tmp_path):
    stock = str(save_member(tmp_path / "stock.pt", switch_config(**SIZES), 2, dictionary=None))
    main([stock, members[0], "--out", f"{tmp_path}/E.pt"])
    state = torch.load(tmp_path / "E.pt", weights_only=True)["task_state"]
    assert state == {"alma_dictionary_sha256": "d" * 64}


def test_an_ensemble_contains_neither_itself_nor_another_one(members, tmp_path):
    assert "is a member of the ensemble" in refused(tmp_path, *members, "--out", members[1], "--force", "--embed")
    main([members[0], "--out", f"{tmp_path}/E.pt"])
    line = refused(tmp_path, f"{tmp_path}/E.pt", members[1], "--out", f"{tmp_path}/F.pt")
    assert "E.pt: an ensemble itself" in line


def test_the_command_needs_no_fairseq(members, tmp_path):
    code = "import sys; from fairseq_alma.cli.ensemble import main; main(sys.argv[1:]); print('fairseq' in sys.modules)"
    words = [sys.executable, "-c", code, *members, "--out", f"{tmp_path}/E.pt"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[-1] == "False"


TRAIN = [
    "--user-dir", "fairseq_alma", "--task", "alma_lm", "--criterion", "alma_switch_cross_entropy", "--cpu",
    "--optimizer", "adam", "--lr", "0.01", "--batch-size", "8", "--tokens-per-sample", "16", "--max-update", "20",
    "--num-workers", "0", "--disable-validation", "--no-epoch-checkpoints", "--megabatch", "0",
]  # fmt: skip
SMALL = ["--decoder-layers", "2", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "32",
         "--decoder-attention-heads", "2"]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory, checkout):
    """A stream S, two trained models of different architecture, and their ensemble E.pt."""
    folder = tmp_path_factory.mktemp("ensemble")
    write_text(folder / "text.txt")
    prepare = ["alma-prep-text", f"{folder}/text.txt", "--out", f"{folder}/S", "--megabatches", "1"]
    prepare += ["--vocab-size", "300", "--valid-bytes", "1200", "--test-bytes", "1200", "--workers", "1"]
    subprocess.run(prepare, check=True, stderr=subprocess.PIPE)
    archs = {
        "a": ["--arch", "alma_switch_lm_tiny", "--num-experts", "4", *SMALL],
        "b": ["--arch", "alma_switch_lm_base", "--num-experts", "1", *SMALL],
    }
    for name, arch in archs.items():
        train = ["fairseq-train", f"{folder}/S", *TRAIN, *arch, "--save-dir", f"{folder}/{name}"]
        run_script(train, cwd=checkout).check_returncode()
    main([f"{folder}/{name}/checkpoint_last.pt" for name in archs] + ["--out", f"{folder}/E.pt"])
    return folder


def run(command, folder, checkout, path, *options, before=(), **keywords):
    words = [
        command,
        *before,
        f"{folder}/S",
        "--user-dir",
        "fairseq_alma",
        "--task",
        "alma_lm",
        "--path",
        path,
        "--cpu",
    ]
    return run_script([*words, *options], cwd=checkout, **keywords)


def probabilities_of_targets(model, tokens):
    """Return each token's probability, given those before it in blocks of 16, as fairseq cuts them."""
    inputs = torch.cat([torch.tensor([2]), tokens[:-1]])
    found = []
    for block, target in zip(inputs.split(16), tokens.split(16), strict=True):
        with torch.no_grad():
            probabilities = model(block.unsqueeze(0))[0][0].double().softmax(dim=-1)
        found.append(probabilities.gather(1, target.unsqueeze(1)).squeeze(1))
    return torch.cat(found)


def test_fairseq_eval_lm_prints_the_perplexity_of_the_mean_probabilities(trained, checkout):
    stream = Stream.open(trained / "S")
    tokens = torch.from_numpy(TokenFile(stream.prefix(stream.split("test"))).ids.astype("int64"))
    num_tokens = 300
    members = [load(trained / name / "checkpoint_last.pt", num_tokens) for name in "ab"]
    mean = sum(probabilities_of_targets(member, tokens) for member in members) / 2
    want = -mean.log2().mean().item()
    for batch_size in ("1", "7"):
        options = ["--gen-subset", "test", "--tokens-per-sample", "16", "--batch-size", batch_size]
        done = run("fairseq-eval-lm", trained, checkout, f"{trained}/E.pt", *options)
        loss, perplexity = re.search(r"Loss \(base 2\): (\S+), Perplexity: (\S+)", done.stdout + done.stderr).groups()
        assert float(loss) == pytest.approx(want, abs=6e-5)
        assert float(perplexity) == pytest.approx(2**want, abs=0.006)
        module = ["-P", "-m", "fairseq_alma.text.split_losses"]
        done = run(Path(sys.executable).name, trained, checkout, f"{trained}/E.pt", *options, before=module)
        assert float(re.search(r"test: (\S+) bits per token", done.stdout)[1]) == pytest.approx(want, abs=6e-5)


@pytest.mark.slow
def test_new_members_alone_are_tested_and_added_to_what_those_before_predict(trained, tmp_path):
    places = [shutil.copytree(trained / name, tmp_path / name) / "checkpoint_last.pt" for name in "ab"]
    main([str(places[0]), "--out", f"{tmp_path}/first.pt"])
    main([*map(str, places), "--out", f"{tmp_path}/both.pt"])

    def losses(ensemble, *more):
        words = [str(trained / "S"), "--user-dir", "fairseq_alma", "--task", "alma_lm", "--cpu", "--path", ensemble]
        words += ["--gen-subset", "valid,test", "--tokens-per-sample", "16", *more]
        done = run_script([Path(sys.executable).name, "-P", "-m", "fairseq_alma.text.split_losses", *map(str, words)])
        return dict(re.findall(r"(\w+): (\S+) bits per token", done.stdout)), done

    whole, _ = losses(tmp_path / "both.pt", "--out", tmp_path / "whole.npz", "--batch-size", "7")
    losses(tmp_path / "first.pt", "--out", tmp_path / "first.npz", "--batch-size", "7")
    places[0].unlink()
    known = ("--known", tmp_path / "first.npz", "--out", tmp_path / "both.npz", "--batch-size", "7")
    assert losses(tmp_path / "both.pt", *known)[0] == whole and [*whole] == ["valid", "test"]
    assert (tmp_path / "both.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
    failed = losses(tmp_path / "both.pt", "--known", tmp_path / "none.npz")[1]
    assert failed.returncode == 1 and "this member of the ensemble is missing" in failed.stderr.splitlines()[-1]


def test_sequences_longer_than_the_smallest_member_takes_are_refused_rather_than_skipped(trained, checkout):
    done = run(
        "fairseq-eval-lm", trained, checkout, f"{trained}/E.pt", "--gen-subset", "test", "--tokens-per-sample", "512"
    )
    assert done.returncode == 1
    assert "--tokens-per-sample 512: the model takes sequences of 16 tokens at most" in done.stderr.splitlines()[-1]


def test_fairseq_interactive_writes_text(trained, checkout):
    options = ["--beam", "1", "--sampling", "--nbest", "1", "--max-len-b", "8", "--buffer-size", "2"]
    options += ["--batch-size", "2"]
    done = run("fairseq-interactive", trained, checkout, f"{trained}/E.pt", *options, typed="ab\nabcd efgh\n")
    texts = re.findall(r"^D-\d\t\S+\t(.*)$", done.stdout, re.MULTILINE)
    assert len(texts) == 2, done.stderr
    assert texts[0].startswith("ab") and texts[1].startswith("abcd efgh")


def test_the_hub_interface_samples_from_an_ensemble(trained):
    hub = FairseqLanguageModel.from_pretrained(
        str(trained), "E.pt", data_name_or_path=str(trained / "S"), bpe="alma", path=str(trained / "E.pt")
    )
    assert hub.sample("abcd", beam=2, max_len_b=8).startswith("abcd")
    assert hub.score("abcd efgh")["positional_scores"].isfinite().all()


def test_a_missing_member_ends_fairseq_eval_lm_in_one_line(trained, checkout, tmp_path):
    shutil.copytree(trained / "a", tmp_path / "a")
    main([f"{tmp_path}/a/checkpoint_last.pt", "--out", f"{tmp_path}/E.pt"])
    (tmp_path / "a" / "checkpoint_last.pt").unlink()
    done = run("fairseq-eval-lm", trained, checkout, f"{tmp_path}/E.pt", "--gen-subset", "test")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"{tmp_path}/a/checkpoint_last.pt: this member of the ensemble is missing" in done.stderr.splitlines()[-1]
