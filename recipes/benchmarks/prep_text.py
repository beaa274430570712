"""Compare alma-prep-text with the stock path on the same text and tokenizer, in alternation.

The stock path: encode with ``tokenizers`` (batches, all threads), write one document per line, then
``fairseq-preprocess --only-source --workers 2 --dataset-impl mmap --srcdict``. The script also compares the numbers of
tokens. Hardware: two cores; time: about four minutes per 100 MB and repetition.

    python recipes/benchmarks/prep_text.py --input wiki.00.txt.xz wiki.01.txt.xz --repeat 2
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Iterator

from data_prep.text.documents import FilePart, documents_of, find_sources
from fairseq_alma.data.stream import Stream
from fairseq_alma.data.tokens import StreamTokenizer, TokenFile


def documents(paths: list[str]) -> Iterator[list[str]]:
    """Yield the documents of text files, in lists of about one MiB."""
    for source in find_sources(paths, "text", "text", None):
        for block in FilePart(source).blocks():
            yield documents_of(block)


def encode_to_text(raw: str, tokenizer: str, encoded: str) -> None:
    """Encode text as the stock path does: one document per line, its tokens separated by spaces."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(tokenizer)
    pieces = [encoder.id_to_token(unit) or "" for unit in range(encoder.get_vocab_size())]
    with open(encoded, "w", encoding="utf-8") as file:
        for batch in documents([raw]):
            for encoding in encoder.encode_batch_fast(batch, add_special_tokens=False):
                file.write(" ".join([pieces[unit] for unit in encoding.ids]) + "\n")


def run(command: list[str], workers: int) -> float:
    """Run a command and return its wall time in seconds."""
    threads = {"RAYON_NUM_THREADS": str(workers), "TOKENIZERS_PARALLELISM": "true"}
    start = time.monotonic()
    result = subprocess.run(command, env={**os.environ, **threads}, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{command[0]}: exit status {result.returncode}: {result.stderr[-2000:]}")
    return time.monotonic() - start


def run_stock(work: Path, workers: int) -> tuple[float, float]:
    """Run the stock path; return the seconds of encoding and of fairseq-preprocess."""
    raw, tokenizer, encoded = (str(work / name) for name in ("raw.txt", "given/tokenizer/tokenizer.json", "encoded"))
    encoding = run([sys.executable, __file__, "--stock-encode", raw, tokenizer, encoded], workers)
    command = ["fairseq-preprocess", "--only-source", "--workers", str(workers), "--dataset-impl", "mmap"]
    command += ["--srcdict", str(work / "given/dict.txt"), "--trainpref", encoded, "--destdir", str(work / "stock")]
    return encoding, run(command, workers)


def run_alma(work: Path, workers: int) -> float:
    """Run alma-prep-text with the same tokenizer; return the seconds."""
    shutil.rmtree(work / "alma", ignore_errors=True)
    command = ["alma-prep-text", str(work / "raw.txt"), "--out", str(work / "alma"), "--megabatches", "1"]
    command += ["--tokenizer", str(work / "given/tokenizer"), "--keep-duplicates", "--no-decontaminate"]
    return run([*command, "--workers", str(workers)], workers)


def prepare_inputs(args: argparse.Namespace, work: Path) -> None:
    """Write the text, tokenizer and dictionary that both paths use."""
    with open(work / "raw.txt", "w", encoding="utf-8") as file:
        for batch in documents(args.input):
            file.writelines(f"{document}\n\n" for document in batch)
    choice = ["--tokenizer", args.tokenizer] if args.tokenizer else ["--vocab-size", str(args.vocab_size)]
    command = ["alma-prep-text", str(work / "raw.txt"), "--out", str(work / "given"), "--megabatches", "1"]
    run([*command, *choice], args.workers)


def compare(args: argparse.Namespace, work: Path) -> None:
    """Run both paths in alternation and print the times, the ratio of their medians, and the token counts."""
    prepare_inputs(args, work)
    megabytes = (work / "raw.txt").stat().st_size / 1e6
    units = StreamTokenizer.open(work / "given").vocab_size
    print(f"{megabytes:.1f} MB of text, {units} tokens in the vocabulary, {args.workers} workers", flush=True)
    stock_times, alma_times = [], []
    for repetition in range(args.repeat):
        alma_times.append(run_alma(work, args.workers))
        encoding, preprocessing = run_stock(work, args.workers)
        stock_times.append(encoding + preprocessing)
        print(
            f"run {repetition + 1}: alma-prep-text {alma_times[-1]:.1f} s; stock {stock_times[-1]:.1f} s "
            f"(encoding {encoding:.1f} s, fairseq-preprocess {preprocessing:.1f} s)",
            flush=True,
        )
    alma, stock = statistics.median(alma_times), statistics.median(stock_times)
    print(
        f"median: alma-prep-text {alma:.1f} s ({megabytes / alma:.1f} MB/s), stock {stock:.1f} s, {stock / alma:.2f} x"
    )
    tokens = sum(split.num_tokens for split in Stream.open(work / "alma").splits)
    print(f"tokens: alma-prep-text {tokens:,}, stock {len(TokenFile(work / 'stock/train').ids):,}")


def main() -> None:
    """Parse the command line and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", metavar="FILE", help="text, documents separated by an empty line")
    parser.add_argument("--tokenizer", help="tokenizer.json for both paths (default: trained before the measurement)")
    parser.add_argument(
        "--vocab-size", type=int, default=50_000, help="vocabulary size to train (default: %(default)s)"
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="processes or threads of each path (default: %(default)s)"
    )
    parser.add_argument("--repeat", type=int, default=1, help="runs of each path (default: %(default)s)")
    parser.add_argument("--stock-encode", nargs=3, metavar=("RAW", "TOKENIZER", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stock_encode:
        encode_to_text(*args.stock_encode)
    elif args.input:
        with tempfile.TemporaryDirectory() as work:
            compare(args, Path(work))
    else:
        parser.error("--input: missing; give one or more text files")


if __name__ == "__main__":
    main()
