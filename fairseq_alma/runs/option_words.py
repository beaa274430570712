"""The words after ``--`` of alma-stream as options with their values; fairseq's parser takes seconds to import."""

from typing import Mapping, Optional, Sequence

Option = tuple[str, tuple[str, ...]]

SHORT = {"-a": "--arch", "--max-sentences": "--batch-size", "--max-sentences-valid": "--batch-size-valid"}


def _is_option(word: str) -> bool:
    """Tell an option from a value; a negative number is a value."""
    return word.startswith("-") and not word[1:2].isdigit() and not word.startswith("-.") and word != "-"


def group_words(words: Sequence[str]) -> list[Option]:
    """Group words into options with their values; ``--name=value`` is split."""
    options: list[Option] = []
    for word in words:
        if _is_option(word):
            name, equals, value = word.partition("=")
            options.append((SHORT.get(name, name), (value,) if equals else ()))
        elif options:
            options[-1] = (options[-1][0], (*options[-1][1], word))
        else:
            raise ValueError(f"{word!r} after the -- belongs to no option; give options of fairseq-train")
    return options


def without(words: Sequence[str], left_out: Mapping[str, Optional[int]]) -> list[str]:
    """Leave out some options of a command line.

    Args:
        words: the command line.
        left_out: their names, and how many words each is followed by; None: all up to the next option.
    """
    kept: list[str] = []
    skip: Optional[int] = 0
    for word in words:
        name, is_given, _ = word.partition("=")
        if skip is None and _is_option(word):
            skip = 0
        if skip != 0:
            skip = None if skip is None else skip - 1
        elif name not in left_out:
            kept.append(word)
        elif not is_given:
            skip = left_out[name]
    return kept
