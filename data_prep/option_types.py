"""Types of option values that both prep commands take."""

import argparse


def positive(text: str) -> int:
    """Return the number of at least 1 that a text stands for; ``10_000`` is one."""
    number = int(text.replace("_", ""))
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} found, a number of at least 1 is needed")
    if number >= 2**63:
        raise argparse.ArgumentTypeError(f"{text} found, a number below 2^63 is needed")
    return number


positive.__name__ = "whole number"  # argparse names it in its message


def share(text: str) -> float:
    """Return the number above 0 and below 1 that a text stands for."""
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{text} found, a number above 0 and below 1 is needed")
    return number


share.__name__ = "number"


def utf8(text: str) -> str:
    """Return a name that a manifest can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} found, a name in UTF-8 is needed") from error
    return text


def check_seed(parser: argparse.ArgumentParser, seed: int) -> None:
    """End the program with a usage error unless the seed is one that every generator takes."""
    if not 0 <= seed < 2**63:
        parser.error(f"--seed {seed}: from 0 to 2^63 - 1; give another number")
