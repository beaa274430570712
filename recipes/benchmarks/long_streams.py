"""CPU seconds of a stage of text on streams of more and more tiny mega-batches: what an arrival costs beside learning.

    python recipes/benchmarks/long_streams.py --megabatches 10 100 500 --learner sm gens

A stage trains for five updates on 400 words and is tested on as many twice, so that nearly all of it is fixed cost. The
seconds are those of `alma-stream` and all processes that it starts, user and system; they are counted, not waited for.
"""

import argparse
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

WORDS_OF_DOCUMENT, DOCUMENTS = 20, 20
WORDS = (
    "--arch alma_switch_lm_tiny --decoder-layers 2 --decoder-embed-dim 8 --decoder-ffn-embed-dim 16 "
    "--decoder-attention-heads 2 --num-experts 2 --criterion alma_switch_cross_entropy --cpu --optimizer adam "
    "--lr 0.01 --max-update 5 --batch-size 8 --tokens-per-sample 32 --num-workers 0"
)


def make_stream(root: Path, num_megabatches: int) -> Path:
    """Prepare a stream of documents in which each word all but decides the next."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(60)]
    documents = []
    for number in range(num_megabatches * DOCUMENTS + 60):
        at, document = draw.randrange(60), [str(number)]
        for _ in range(WORDS_OF_DOCUMENT):
            at = (at * 7 + draw.randrange(3)) % 60
            document.append(words[at])
        documents.append(" ".join(document))
    text, stream = root / "text.txt", root / "stream"
    text.write_text("\n\n".join(documents))
    sizes = ["--vocab-size", "256", "--valid-words", "400", "--test-words", "400", "--no-decontaminate"]
    command = ["alma-prep-text", str(text), "--out", str(stream), "--megabatches", str(num_megabatches), *sizes]
    run(command)
    return stream


def run(command: list[str]) -> float:
    """Run a command of this environment; return its CPU seconds and those of its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    program = str(Path(sys.executable).with_name(command[0]))
    subprocess.run([program, *command[1:]], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabatches", type=int, nargs="+", default=[10, 100, 500])
    parser.add_argument("--learner", nargs="+", default=["sm", "gens"])
    parser.add_argument("--work", type=Path, help="folder for streams and runs (default: one that goes)")
    arguments = parser.parse_args()
    print("| learner | stages | CPU s | each further stage, CPU s |\n|---|---:|---:|---:|")
    for learner in arguments.learner:
        before = (0, 0.0)
        for number in arguments.megabatches:
            with tempfile.TemporaryDirectory(dir=arguments.work) as root:
                stream = make_stream(Path(root), number)
                own = ["--stream", str(stream), "--run", f"{root}/run", "--learner", learner]
                seconds = run(["alma-stream", *own, "--", *WORDS.split()])
            each = (seconds - before[1]) / (number - before[0]) if before[0] else None
            shown = "" if each is None else f"{each:.2f}"
            print(f"| {learner} | {number} | {seconds:.1f} | {shown} |", flush=True)
            before = (number, seconds)


if __name__ == "__main__":
    main()
