"""``recipes/tour.py`` runs, and the examples of the notebook functions hold in its output folder."""

import doctest
import json
import math
import runpy
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import fairseq_alma
from data_prep.corpus import main as fetch
from fairseq_alma.cli import notebook
from fairseq_alma.cli.ensemble import main as ensemble
from fairseq_alma.data.tokens import TokenFile

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tour(tmp_path_factory, checkout):
    """Return the output folder of the tour and its printed lines."""
    folder = tmp_path_factory.mktemp("tour")
    assert fetch(["kjv", "--text", f"{folder}/kjv.txt"]) in (0, None)
    chapters = (folder / "kjv.txt").read_text().split("\n\n")[:24]
    (folder / "text.txt").write_text("\n\n".join(chapters))
    printed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tour.py", str(folder), "--updates", "25"])
        patch.setattr("builtins.print", lambda *words, **options: printed.append(" ".join(map(str, words))))
        runpy.run_path(str(checkout / "recipes" / "tour.py"), run_name="__main__")
    return folder, "\n".join(printed)


def test_the_tour_prints_growth_text_and_losses_and_exports_a_model(tour):
    folder, printed = tour
    assert "2 mega-batches" in printed and "after two: And God said" in printed and "bits_per_byte" in printed
    assert (folder / "exported" / "model.safetensors").is_file()
    card = (folder / "exported" / "README.md").read_text()
    assert "| learner | gmoe, waiting time 1, seed 1 |" in card and "test perplexity" in card
    assert "| mega-batches seen | 2 of 2 (stage 1)" in card
    # the perplexity of the card is the run's
    value = fairseq_alma.read_run(folder / "run").value.iloc[1]
    assert f"| test perplexity | {value:.2f} per token" in card


def test_the_exported_model_has_the_perplexity_that_the_run_states(tour):
    folder = tour[0]
    ids = torch.tensor([2, *TokenFile(folder / "stream/test").ids.tolist()])
    model = AutoModelForCausalLM.from_pretrained(folder / "exported").eval()
    nats = 0.0
    for start in range(0, len(ids) - 1, 64):
        window = ids[start : start + 65]
        with torch.no_grad():
            nats += torch.nn.functional.cross_entropy(model(window[None, :-1]).logits[0], window[1:], reduction="sum")
    record = json.loads((folder / "run/stage-001/stage.json").read_text())
    assert float(nats) / (len(ids) - 1) / math.log(2) == pytest.approx(record["test"]["loss"], abs=2e-3)


@pytest.mark.parametrize("name", ["open_stream", "read_run", "load_model", "score"])
def test_the_examples_of_the_notebook_functions_hold(name, tour, monkeypatch):
    monkeypatch.chdir(tour[0])
    found = doctest.DocTestFinder().find(getattr(notebook, name), name, globs={})
    assert found and found[0].examples
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(found[0])
    assert results.failed == 0 and results.attempted > 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["out", "--text", "nothere.txt"], "nothere.txt: no such file\n"),
        (["taken"], "taken: cannot create this folder (File exists); give another path\n"),
    ],
)
def test_a_missing_text_or_invalid_folder_is_one_line_and_nothing_is_written(
    words, said, tmp_path, checkout, monkeypatch, capsys
):
    (tmp_path / "taken").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tour.py", *words])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(checkout / "recipes" / "tour.py"), run_name="__main__")
    assert (stopped.value.code, capsys.readouterr().err) == (2, said)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_average_of_a_run_is_that_of_its_newest_stage(tour, tmp_path):
    assert ensemble([str(tour[0] / "run"), "--average", "--out", str(tmp_path / "a.pt")]) == 0
    paths = tour[0] / "run/stage-001/member-0/checkpoint_average.pt", tmp_path / "a.pt"
    needed, found = (torch.load(path)["model"] for path in paths)
    assert found.keys() == needed.keys() and all(torch.equal(found[name], needed[name]) for name in needed)
