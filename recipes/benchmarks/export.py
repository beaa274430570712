"""Time alma-export of the large model against loading and saving its checkpoint, and generation against fairseq's.

    python recipes/benchmarks/export.py --experts 12             # export: time and memory
    python recipes/benchmarks/export.py --generate CKPT          # CKPT: of a model trained on a stream

Export: a checkpoint with random weights is written to a temporary folder (1.7 GB with 12 experts). A measurement runs
in a process of its own; memory is the process's peak beyond what it holds after its imports. Both take turns, --rounds
times. The tokenizer's check is part of it, on a stream of a few documents whose vocabulary is filled up.

Generation: alma-generate's model and fairseq-interactive's, each in one process, seconds for one greedy continuation
after loading, best of --rounds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from growth import VOCAB_SIZE, peak_mib, write_source

from fairseq_alma.checkpoints.checkpoint_file import DICTIONARY_KEY, read_checkpoint, write_checkpoint
from fairseq_alma.data.stream import Stream


def write_stream(folder: Path) -> Path:
    """Prepare a small stream whose tokenizer has the large model's number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from data_prep.text.command import main

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = alphabet + [f"unused{number}" for number in range(VOCAB_SIZE - len(alphabet))]
    tokenizer = Tokenizer(models.BPE(vocab={piece: token for token, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text("\n\n".join(f"document {number} of the small text" for number in range(400)))
    words = [
        folder / "text.txt",
        "--out",
        folder / "stream",
        "--megabatches",
        1,
        "--tokenizer",
        folder / "tokenizer.json",
    ]
    main([str(word) for word in [*words, "--valid-words", 200, "--test-words", 200]])
    return folder / "stream"


def run_job(job: str, source: Path, out: Path) -> None:
    """Do one measurement in this process and print seconds and MiB."""
    from fairseq_alma.exchange.model_folder import export_model

    base = peak_mib()
    begun = time.perf_counter()
    if job == "copy-file":
        write_checkpoint(read_checkpoint(source, mmap=False), out)
    else:
        export_model(source, out)
    print(time.perf_counter() - begun, peak_mib() - base)


def measure_export(num_experts: int, rounds: int) -> None:
    """Run both jobs in turn and print the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "source.pt"
        stream = write_stream(folder)
        state = {DICTIONARY_KEY: Stream.open(stream).dictionary_sha256}
        cfg = {"task": {"_name": "alma_lm", "data": str(stream)}}
        write_source(source, num_experts, cfg=cfg, task_state=state)
        size = source.stat().st_size / 2**20
        print(f"large, {num_experts} experts; checkpoint of {size:,.0f} MiB")
        results: dict[str, list[list[float]]] = {"copy-file": [], "export": []}
        for number in range(rounds):
            for job, rows in results.items():
                words = [sys.executable, __file__, "--job", job, str(source), f"{folder}/out-{job}-{number}"]
                output = subprocess.run(words, check=True, capture_output=True, text=True).stdout
                rows.append([float(word) for word in output.split()[-2:]])
                subprocess.run(["rm", "-rf", f"{folder}/out-{job}-{number}"], check=True)
    for job, title in (("copy-file", "load and save"), ("export", "alma-export")):
        seconds, memory = (statistics.median(column) for column in zip(*results[job], strict=True))
        print(f"{title:13} | {seconds:5.1f} s | peak {memory:,.0f} MiB, {memory / size:.2f} checkpoints")
    ratio = statistics.median(e[0] / c[0] for e, c in zip(results["export"], results["copy-file"], strict=True))
    print(f"alma-export takes {ratio:.2f} times as long")


def measure_generation(path: Path, prompt: str, num_tokens: int, rounds: int) -> None:
    """Time one greedy continuation, in transformers' generate and in fairseq's generator."""
    from fairseq.models import FairseqLanguageModel

    from fairseq_alma.exchange.load_model import load_model

    torch.set_num_threads(1)
    loaded = load_model(path)
    stream = read_checkpoint(path)["cfg"]["task"]["data"]
    hub = FairseqLanguageModel.from_pretrained(
        str(path.parent), path.name, data_name_or_path=stream, bpe="alma", path=str(path)
    )
    tokens = hub.encode(prompt)
    length = len(tokens) - 1 + num_tokens

    def ours() -> str:
        return loaded.generate(prompt, num_tokens, min_new_tokens=num_tokens)

    def stock() -> str:
        found = hub.generate(tokens, beam=1, max_len_b=length, min_len=length)[0]["tokens"]
        return hub.decode(found[:length])

    times: dict[str, list[float]] = {"alma-generate": [], "fairseq-interactive": []}
    for _ in range(rounds):
        for name, write in (("alma-generate", ours), ("fairseq-interactive", stock)):
            begun = time.perf_counter()
            write()
            times[name].append(time.perf_counter() - begun)
    print(json.dumps({"prompt tokens": len(tokens) - 1, "new tokens": num_tokens}))
    for name, seconds in times.items():
        print(f"{name:19} | {min(seconds):6.3f} s | {num_tokens / min(seconds):7.1f} tokens/s")


def main() -> None:
    """Measure what is asked for."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--experts", type=int, default=12, help="experts of the source (default: %(default)s)")
    options.add_argument("--rounds", type=int, default=3, help="rounds (default: %(default)s)")
    options.add_argument("--generate", type=Path, metavar="CKPT", help="time generation with this model")
    options.add_argument("--prompt", default="In the beginning God created the heaven", help="of --generate")
    options.add_argument("--tokens", type=int, default=40, help="new tokens (default: %(default)s)")
    options.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.job:
        run_job(args.job[0], Path(args.job[1]), Path(args.job[2]))
    elif args.generate:
        measure_generation(args.generate, args.prompt, args.tokens, args.rounds)
    else:
        measure_export(args.experts, args.rounds)


if __name__ == "__main__":
    main()
