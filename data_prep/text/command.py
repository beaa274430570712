"""``alma-prep-text``: raw text to a stream of mega-batches."""

import sys
import time
from typing import Optional, Sequence

from data_prep.text.options import parse_options
from data_prep.text.prepare import prepare
from fairseq_alma.cli.entry import command
from fairseq_alma.data.stream import Stream
from fairseq_alma.terminal import tell


@command
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and say what came out."""
    options = parse_options(argv)
    start = time.monotonic()
    stream = prepare(options)
    if stream is None:
        tell(f"{options.out}: this very command has been completed before; nothing to do", sys.stdout)
    else:
        _describe(stream, time.monotonic() - start)
    return 0


def _describe(stream: Stream, seconds: float) -> None:
    """Print what a stream consists of after a command."""
    assert stream.tokenizer is not None
    print(f"{'split':<22}{'documents':>12}{'words':>15}{'tokens':>15}{'bytes of text':>17}")
    for split in stream.splits:
        print(
            f"{split.name:<22}{split.num_documents:>12,}{split.num_words:>15,}{split.num_tokens:>15,}"
            f"{split.num_bytes:>17,}"
        )
    last = stream.history[-1]
    vocab_size = stream.tokenizer.vocab_size
    print(f"{last['num_duplicates']:,} duplicates dropped, vocabulary size {vocab_size:,}, {seconds:.1f} s")
    wanted = last["options"].get("--vocab-size")
    if wanted is not None and wanted != vocab_size:
        print(f"--vocab-size {wanted}: the first mega-batch gives {vocab_size} tokens only")


if __name__ == "__main__":
    sys.exit(main(None))
