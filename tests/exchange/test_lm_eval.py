"""The evaluation harness runs offline on an exported folder, and counts what alma-score counts."""

import json

import datasets
import pytest

from fairseq_alma.exchange.load_model import load_model, score_texts

lm_eval = pytest.importorskip("lm_eval", reason="the evaluation harness has thirty dependencies: extra [evaluate]")
TEXTS = ["the cat sat on a mat", "dogs <barked> at 42 moons", "naïve dogs was never known 北京"]


def test_bits_per_byte_and_the_cloze_task_are_those_of_our_own_scores(
    folders, checkpoints, checkout, tmp_path, monkeypatch
):
    from lm_eval.tasks import TaskManager

    for name, value in {"HF_DATASETS_OFFLINE": True, "HF_HUB_OFFLINE": True, "HF_DATASETS_CACHE": tmp_path}.items():
        monkeypatch.setattr(datasets.config, name, value)
    (tmp_path / "alma_text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    monkeypatch.chdir(tmp_path)
    found = {}
    for task, options in (("alma_text", ",add_bos_token=False"), ("alma_cloze", "")):
        found |= lm_eval.simple_evaluate(
            model="hf",
            model_args=f"pretrained={folders['ensemble']},trust_remote_code=True,device=cpu,dtype=float32{options}",
            tasks=[task],
            task_manager=TaskManager(include_path=str(checkout / "recipes" / "lm_eval"), include_defaults=False),
            batch_size=2,
            bootstrap_iters=0,
        )["results"]
    loaded = load_model(checkpoints["ensemble"])
    scores = list(score_texts(loaded, TEXTS))
    needed = sum(score.bits for score in scores) / sum(score.num_bytes for score in scores)
    assert found["alma_text"]["bits_per_byte,none"] == pytest.approx(needed, rel=1e-5)
    # the last word costs what the text costs beyond what stands before it: tokens do not cross a space
    before = list(score_texts(loaded, [text.rsplit(" ", 1)[0] for text in TEXTS]))
    bits = [score.bits - begin.bits for score, begin in zip(scores, before, strict=True)]
    assert found["alma_cloze"]["perplexity,none"] == pytest.approx(2 ** (sum(bits) / len(bits)), rel=1e-4)
    assert 0 <= found["alma_cloze"]["acc,none"] <= 1
