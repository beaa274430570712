"""The evaluation harness runs offline on any checkpoint, and on an exported folder, and counts what `score` counts."""

import importlib.util
import json
import math

import datasets
import pytest

from fairseq_alma.text.loaded_model import load_model
from tests.exchange.conftest import LONGEST

pytestmark = pytest.mark.slow
lm_eval = pytest.importorskip("lm_eval", reason="the evaluation harness has thirty dependencies: extra [evaluate]")
TEXTS = [
    "the cat sat on a mat", "dogs <barked> at 42 moons", "naïve dogs was never known 北京", "the cat " * 20 + "sat",
]  # fmt: skip


@pytest.fixture
def evaluate(checkout, tmp_path, monkeypatch):
    """Return a function that runs a task on a model; the documents are those of a file in the current folder."""
    from lm_eval.tasks import TaskManager

    for name, value in {"HF_DATASETS_OFFLINE": True, "HF_HUB_OFFLINE": True, "HF_DATASETS_CACHE": tmp_path}.items():
        monkeypatch.setattr(datasets.config, name, value)
    (tmp_path / "alma_text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    monkeypatch.chdir(tmp_path)
    tasks = TaskManager(include_path=str(checkout / "recipes" / "lm_eval"), include_defaults=False)

    def run(task, **how):
        found = lm_eval.simple_evaluate(tasks=[task], task_manager=tasks, batch_size=2, bootstrap_iters=0, **how)
        return found["results"][task]

    return run


@pytest.fixture(scope="module")
def adapter(checkout):
    spec = importlib.util.spec_from_file_location("evaluate", checkout / "recipes/lm_eval/evaluate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.AlmaLM


def test_the_adapter_counts_what_score_counts_of_an_ensemble_too(adapter, evaluate, checkpoints):
    loaded = load_model(checkpoints["ensemble"])
    scores = loaded.score(TEXTS)
    needed = sum(score.bits for score in scores) / sum(score.num_bytes for score in scores)
    found = evaluate("alma_text", model=adapter(loaded))
    assert found["bits_per_byte,none"] == pytest.approx(needed, rel=1e-5)
    short = TEXTS[:3]
    bits = [score.bits for score in loaded.score(short)]
    # the last word costs what the text costs beyond what stands before it: tokens do not cross a space
    before = [score.bits for score in loaded.score([text.rsplit(" ", 1)[0] for text in short])]
    requests = [type("Request", (), {"args": (text.rsplit(" ", 1)[0], " " + text.rsplit(" ", 1)[1])}) for text in short]
    words = adapter(loaded).loglikelihood(requests, disable_tqdm=True)
    for (nats, _), total, begin in zip(words, bits, before, strict=True):
        assert -nats / math.log(2) == pytest.approx(total - begin, rel=1e-4)
    text, long = loaded.generate("the cat", 6)[len("the cat") :], "moons " * 30
    for prompt, until, needed in (
        *(("the cat", until, text[: text.find(text[3:5])]) for until in (text[3:5], [text[3:5]])),
        ("the cat", None, text),
        (long, [], loaded.continue_ids(loaded.encode(long)[6 - LONGEST :], 6)),
    ):
        request = type("Request", (), {"args": (prompt, {"until": until, "max_gen_toks": 6})})
        assert adapter(loaded).generate_until([request]) == [needed]
    ids = loaded.encode(TEXTS[3])  # longer than the window
    ((nats, _),) = adapter(loaded)._loglikelihood_tokens([(None, [2], ids)])
    assert len(ids) > LONGEST and -nats / math.log(2) == pytest.approx(scores[3].bits, rel=1e-6)


@pytest.mark.parametrize("task", ["alma_text", "alma_cloze"])
def test_an_exported_folder_has_the_figures_of_its_checkpoint(task, adapter, evaluate, checkpoints, folders, tmp_path):
    (tmp_path / "alma_text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:3]))
    options = ",add_bos_token=False" if task == "alma_text" else ""
    how = f"pretrained={folders['mixture']},device=cpu,dtype=float32{options}"
    there = evaluate(task, model="hf", model_args=how)
    here = evaluate(task, model=adapter(load_model(checkpoints["mixture"])))
    names = ["bits_per_byte,none"] if task == "alma_text" else ["perplexity,none", "acc,none"]
    assert [there[name] for name in names] == pytest.approx([here[name] for name in names], rel=1e-4)
