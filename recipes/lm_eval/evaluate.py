"""Run tasks of the evaluation harness on any checkpoint of this package and print the results as one line of JSON.

    python recipes/lm_eval/evaluate.py RUN --tasks alma_text
    alma-stream … --then-evaluate 'python recipes/lm_eval/evaluate.py {checkpoint} --tasks alma_text alma_cloze'

The script also evaluates ensembles and other models that cannot be exported. It prints the table of the harness to
standard error. Tasks read data from the current folder. Requires pip install 'fairseq-alma[evaluate]'.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}

import torch

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table
except ImportError as error:
    sys.exit(f"{error}; run pip install 'fairseq-alma[evaluate]'")

import fairseq_alma
from fairseq_alma.data.tokens import EOS
from fairseq_alma.text.loaded_model import IGNORED, LoadedModel, cut


class AlmaLM(TemplateLM):
    """A loaded model; texts are tokenized literally and begin with `</s>`, as in training."""

    eot_token_id = EOS

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self.loaded = loaded

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return [EOS] * (add_special_tokens is not False) + self.loaded.encode(string)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        found = []
        for _, context, continuation in requests:
            # A continuation longer than the window keeps one token of context and is scored in several windows.
            ids = [*context, *continuation][-max(self.loaded.longest, len(continuation)) - 1 :]
            ignored = len(ids) - 1 - len(continuation)
            windows = [(each, [IGNORED] * ignored + wanted[ignored:]) for each, wanted in cut(ids, self.loaded.longest)]
            loss = sum(each.double().sum().item() for each in self.loaded.losses(windows))
            best = torch.cat([self.loaded.log_probs(torch.tensor([each]))[0].argmax(dim=-1) for each, _ in windows])
            targets = torch.tensor([each for _, wanted in windows for each in wanted])
            found.append((-loss, bool(((targets == IGNORED) | (targets == best)).all())))
        return found

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        texts = (self.tok_encode(each.args[0]) for each in requests)
        losses = (self.loaded.losses(list(cut(ids, self.loaded.longest))) for ids in texts)
        return [-sum(loss.double().sum().item() for loss in each) for each in losses]

    def generate_until(self, requests, disable_tqdm=False):
        texts = []
        for prompt, how in (each.args for each in requests):
            length, stops = how.get("max_gen_toks", 64), how.get("until") or []
            # The end of a long prompt; at least half of the window is for the prompt.
            ids = self.tok_encode(prompt)[min(length, self.loaded.longest // 2) - self.loaded.longest :]
            text, stops = self.loaded.continue_ids(ids, length), [stops] if isinstance(stops, str) else stops
            texts.append(text[: min((text.find(stop) for stop in stops if stop in text), default=None)])
        return texts


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("model", help="run folder or checkpoint")
    options.add_argument("--tasks", nargs="+", default=["alma_text"], help="names of tasks (default: alma_text)")
    options.add_argument("--include-path", default=str(Path(__file__).parent), help="folder with the task files")
    args = options.parse_args()
    tasks = TaskManager(include_path=args.include_path, include_defaults=False)
    model = AlmaLM(fairseq_alma.load_model(args.model))
    found = lm_eval.simple_evaluate(model=model, tasks=args.tasks, task_manager=tasks, bootstrap_iters=0)
    print(make_table(found), file=sys.stderr)
    values = ((name, key, value) for name, results in found["results"].items() for key, value in results.items())
    numbers = (each for each in values if isinstance(each[2], (int, float)) and each[1] != "sample_len")
    print(json.dumps({f"{name} {key.partition(',')[0]}": value for name, key, value in numbers}))
