"""Text whose next word follows from the two words before, by a table that a small mixture cannot hold.

    python recipes/anytime/markov_text.py --symbols 64 --words 1200000 > text.txt

Each pair of words has SUCCESSORS words that may come next, equally likely, drawn once at random: a perplexity of
SUCCESSORS for who knows the table of symbols x symbols pairs. A line is a document; all lines are from one source, so
that mega-batches are exchangeable, and what a model has memorised of the table serves on test as well.
"""

import argparse
import random
import sys

SUCCESSORS = 3
WORDS_PER_LINE = 40


def main() -> int:
    """Write the text to standard output."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--symbols", type=int, default=64, help="different words, 2 to 676 (default: 64)")
    options.add_argument("--words", type=int, default=1_200_000, help="of the text (default: 1,200,000)")
    options.add_argument("--seed", type=int, default=1, help="of table and text (default: 1)")
    args = options.parse_args()
    if not 2 <= args.symbols <= 676:
        options.error(f"--symbols {args.symbols}: a number from 2 to 676 is needed")
    draw = random.Random(args.seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [first + second for first in letters for second in letters]
    draw.shuffle(words)
    number = args.symbols
    table = [[draw.randrange(number) for _ in range(SUCCESSORS)] for _ in range(number * number)]
    for _ in range(0, args.words, WORDS_PER_LINE):
        line = [draw.randrange(number), draw.randrange(number)]
        while len(line) < WORDS_PER_LINE:
            line.append(table[line[-2] * number + line[-1]][draw.randrange(SUCCESSORS)])
        print(" ".join(words[each] for each in line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
