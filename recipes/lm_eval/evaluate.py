"""Runs tasks of the evaluation harness on a model, and prints their figures as one line of JSON, for --then-evaluate.

    alma-stream … --then-evaluate 'python recipes/lm_eval/evaluate.py {export} --tasks alma_text alma_cloze' -- …

The harness's own table goes to standard error. Tasks are those of this folder, and with --include-path of others; they
read their data from the present folder. Needs the extra [evaluate]. Ten seconds and more for each model, most of them
to import the harness.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

HERE = Path(__file__).parent

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("model", help="a folder that alma-export wrote")
options.add_argument("--tasks", nargs="+", default=["alma_text"], help="names of tasks (default: alma_text)")
options.add_argument("--include-path", default=str(HERE), help="folder of the tasks (default: this script's)")
options.add_argument("--device", default="cpu", help="default: %(default)s")
options.add_argument("--batch-size", type=int, default=4, help="default: %(default)s")
args = options.parse_args()

# alma_text counts each document behind one </s>, which the harness puts there by itself
with_start = {"alma_text": ",add_bos_token=False"}
figures: dict[str, float] = {}
for task in args.tasks:
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={args.model},trust_remote_code=True,dtype=float32{with_start.get(task, '')}",
        tasks=[task],
        task_manager=TaskManager(include_path=args.include_path, include_defaults=False),
        device=args.device,
        batch_size=args.batch_size,
        bootstrap_iters=0,
    )
    print(make_table(found), file=sys.stderr)
    for name, values in found["results"].items():
        numbers = {key.partition(",")[0]: value for key, value in values.items() if isinstance(value, (int, float))}
        figures |= {f"{name} {key}": value for key, value in numbers.items() if key != "sample_len"}
print(json.dumps(figures))
