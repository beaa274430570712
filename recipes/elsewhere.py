"""Reads exported folders where this package is not: torch, transformers and safetensors are enough.

    python recipes/elsewhere.py my_model test.jsonl --tokens 64

Prints a text that each model writes, and its perplexity on documents cut as fairseq-eval-lm cuts a test set: joined,
each behind its end, in windows of --tokens-per-sample. A few seconds for a small model.
"""

import argparse
import json
import math

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("models", nargs="+", help="folders that alma-export wrote")
options.add_argument("documents", help='JSON lines, {"text": ...} in the order of the test set')
options.add_argument("--tokens", type=int, required=True, help="the run's --tokens-per-sample")
options.add_argument("--prompt", default="And God said", help="default: %(default)s")
args = options.parse_args()
with open(args.documents, encoding="utf-8") as lines:
    texts = [json.loads(line)["text"] for line in lines]

for folder in args.models:
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    prompt = tokenizer(args.prompt, return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=15, do_sample=False)
    print(f"{folder}: {tokenizer.decode(written[0], skip_special_tokens=True)}")

    end = tokenizer.eos_token_id
    ids = [end]
    for text in texts:
        ids += [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, args.tokens):
            window = torch.tensor([ids[start : start + args.tokens + 1]])
            log_probabilities = model(window[:, :-1]).logits.double().log_softmax(-1)
            nats -= log_probabilities.gather(-1, window[:, 1:, None]).sum().item()
    print(f"{folder}: perplexity {math.exp(nats / (len(ids) - 1)):.2f} on {len(ids) - 1:,} tokens")
