"""The one declaration of an option: one field of a dataclass, made by `opt`, says all that anything knows of it.

Its flag, help, range, choices, kinds of data, whether run.json names it and whether it binds the run, whether it shapes
the network: the parsers, fairseq's configurations, the check of a file's configuration and the page of all options read
them here. Neither torch nor fairseq: a dry run imports neither.
"""

import argparse
import dataclasses
import functools
import math
import os
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Callable,
    Hashable,
    Iterator,
    Literal,
    Mapping,
    Optional,
    Sequence,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from msgspec import Meta, Struct, defstruct

KINDS = ("text", "images")
"""Kinds of data."""
PLAN, TRAINING = "plan", "training"
"""Sides of an option: alma-stream's, and fairseq-train's, which may have a default of its own (`Option.defaults`)."""
NONE = "none"
"""What fairseq's parser takes, and a checkpoint's configuration has, where an option with choices is not given."""
Number = Union[int, float]
GivenOption = tuple[str, tuple[str, ...]]
"""An option of a command line, and its values."""
SHORT = {"-a": "--arch", "--max-sentences": "--batch-size", "--max-sentences-valid": "--batch-size-valid"}
"""What fairseq's options are also called."""
LARGEST_COUNT = 2**31 - 1
LONGEST_TEXT = 2**26
"""Characters of a value in a file."""
SUPPRESS = argparse.SUPPRESS
"""The help of an option that is for the package itself."""


@dataclass(frozen=True)
class Range:
    """The numbers from ``least`` to ``most``; infinity and NaN are in no range.

    Attributes:
        least: smallest number.
        most: largest number.
        is_whole: whether only whole numbers are in it.
        above: whether ``least`` itself is left out.
        below: whether ``most`` itself is left out.
        is_list: whether an option has several such numbers, as fairseq's ``--lr 0.1,0.05``.
    """

    least: Number
    most: Number = LARGEST_COUNT
    is_whole: bool = True
    above: bool = False
    below: bool = False
    is_list: bool = False

    def read(self, text: str) -> Number:
        """Return the number that a text stands for. Raises ValueError with what is needed if it is not in the range."""
        try:
            value = int(text) if self.is_whole else float(text)
        except ValueError as error:
            raise ValueError(f"a {'whole ' if self.is_whole else ''}number is needed") from error
        self.check(value)
        return value

    def read_all(self, text: str) -> list[Number]:
        """Return the numbers of a list with commas, in brackets or not; see `read`."""
        return [self.read(word.strip()) for word in text.strip("[]() ").rstrip(",").split(",")]

    def check(self, value: Number) -> None:
        """Raise ValueError with what is needed if a number is not in the range."""
        if math.isnan(value):
            raise ValueError("a number is needed")
        if value < self.least or (self.above and value == self.least):
            raise ValueError(f"a number {'above' if self.above else 'of at least'} {spell(self.least)} is needed")
        if value > self.most or (self.below and value == self.most):
            raise ValueError(f"a number {'below' if self.below else 'of at most'} {spell(self.most)} is needed")

    def __str__(self) -> str:
        """Say it in a few words, for the page of all options."""
        least = "" if self.least == -math.inf else f"{'above' if self.above else 'at least'} {spell(self.least)}"
        endless = self.most in (LARGEST_COUNT, 1e30, math.inf)
        most = "" if endless else f"{'below' if self.below else 'at most'} {spell(self.most)}"
        return ", ".join(words for words in (least, most) if words)


class InRange:
    """The type of an option that is a number of a range, for ``add_argument(type=...)``.

    Args:
        bounds: the range.
    """

    def __init__(self, bounds: Range) -> None:
        self.bounds = bounds

    def __call__(self, text: str) -> Number:
        """Return the number that a text stands for."""
        try:
            return self.bounds.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text} found, {error}") from error


def spell(number: Number) -> str:
    """Spell a bound: ``1,000,000``, ``0.5``, ``1e+30``."""
    return f"{number:,}" if isinstance(number, int) or abs(number) < 1e6 else f"{number:g}"


def whole(least: int = 1, most: int = LARGEST_COUNT) -> Range:
    """Return a range of whole numbers."""
    return Range(least, most)


def real(least: Number = 0, most: Number = 1e30, above: bool = False, below: bool = False) -> Range:
    """Return a range of real numbers."""
    return Range(least, most, is_whole=False, above=above, below=below)


def flag(name: str) -> str:
    """Spell an option as a user gives it."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Option:
    """What one field says of its option; `opt` declares it, `options_of` finds it.

    Attributes:
        help: what it means, with its unit.
        range: of its number, or of each of its numbers.
        choices: values that it may have; empty: any.
        kinds: of data on which it has a meaning.
        parse: turns the word into the value; raises ValueError with what is wrong.
        parse_all: turns all words, any number of them, into the value; the message begins with the option.
        free: whether a run may be resumed with another value.
        recorded: whether run.json names it.
        shape: whether it shapes the network, so that a checkpoint to start from must share it.
        side: on which it is an option: `PLAN` or `TRAINING`; None: on both.
        quiet: whether run.json says null where it has its default.
        trait: attribute of the learners to whom it means something; ``{learners}`` in the help stands for them.
        metavar: of its value in ``--help``.
        defaults: kind of data -> default, where it is not the field's.
        name: of the field.
        flag: as a user gives it.
        default: the field's; ``MISSING``: it must be given.
        type: of the value, ``Optional`` taken off.
    """

    help: str
    range: Optional[Range] = None
    choices: tuple[str, ...] = ()
    kinds: tuple[str, ...] = KINDS
    parse: Optional[Callable[[str], Any]] = None
    free: bool = False
    parse_all: Optional[Callable[[Sequence[str]], Any]] = None
    recorded: bool = True
    shape: bool = False
    side: Optional[str] = None
    quiet: bool = False
    trait: Optional[str] = None
    metavar: Optional[str] = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    flag: str = ""
    default: Any = None
    type: Any = str

    def default_on(self, kind: Optional[str] = None) -> Any:
        """Return the default on a kind of data."""
        return self.defaults.get(kind, self.default) if kind is not None else self.default

    def value(self, given: Any) -> Any:
        """Return the value of a word, or of what is a value already.

        Raises:
            ValueError: it is none that the option may have; the message begins with the flag.
        """
        try:
            return self._read(given) if isinstance(given, str) else self._checked(given)
        except ValueError as error:
            raise ValueError(f"{self.flag} {given}: {error}") from error

    def _read(self, word: str) -> Any:
        if self.parse is not None:
            return self.parse(word)
        if self.choices and word not in self.choices:
            raise ValueError(f"choose from {', '.join(self.choices)}")
        if self.range is not None:
            return self.range.read_all(word) if self.range.is_list else self.range.read(word)
        if int in (self.type, *get_args(self.type)):
            return Range(-math.inf, math.inf).read(word)
        return Path(word) if self.type is Path else word

    def _checked(self, value: Any) -> Any:
        if self.range is not None:
            for number in value if isinstance(value, (list, tuple)) else (value,):
                self.range.check(number)
        return value

    def add_to(self, group: Any, kind: Optional[str] = None) -> None:
        """Add it to a group of a parser; what is not given is None there, a value out of range a usage error.

        Args:
            group: of the parser.
            kind: of data that the group is about; None: the help says it.
        """
        shown = SUPPRESS if self.help == SUPPRESS else self._help(kind).replace("%", "%%")
        words: dict[str, Any] = {"dest": self.name, "default": None, "help": shown}
        if self.default is MISSING:
            words["required"] = True
        if self.type is bool:
            group.add_argument(self.flag, action="store_true", **words)
            return
        words |= {"choices": [*self.choices]} if self.choices else {"metavar": self.metavar or "N"}
        if self.parse_all is not None or (get_origin(self.type) is tuple and self.parse is None):
            words["nargs"] = "+" if self.parse_all is None else "*"
        group.add_argument(self.flag, action=_Read, option=self, **words)

    def _help(self, kind: Optional[str]) -> str:
        about = f"{self.kinds[0]}: " if len(self.kinds) == 1 and kind is None else ""
        return f"{about}{self.help}{self.shown_default(kind)}"

    def shown_default(self, kind: Optional[str] = None) -> str:
        """Return `` (default: X)``, or nothing where there is none or the help says it."""
        default = self.default_on(kind)
        is_none = default is None or default is False or default is MISSING
        return "" if is_none or "default:" in self.help else f" (default: {default})"


class _Read(argparse.Action):
    """Stores what an option reads of its words."""

    def __init__(self, *arguments: Any, option: Option, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.option = option

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        try:
            if self.option.parse_all is not None:
                read = self.option.parse_all(values)
            else:
                read = self.option.value(values) if isinstance(values, str) else tuple(map(self.option.value, values))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from error
        except ValueError as error:
            parser.error(str(error))
        setattr(namespace, self.dest, read)


def opt(
    default: Any,
    help: str,
    *,
    range: Optional[Range] = None,
    choices: Sequence[str] = (),
    kinds: tuple[str, ...] = KINDS,
    parse: Optional[Callable[[str], Any]] = None,
    free: bool = False,
    shape: bool = False,
    flag: Optional[str] = None,
    metavar: Optional[str] = None,
    **further: Any,
) -> Any:
    """Declare an option as a field of a dataclass; field ``grow_every`` is ``--grow-every``.

    Args:
        default: its value where the user gives none; ``MISSING``: it must be given.
        help: what it means, with its unit; the default is added to it.
        range: of its number; needed for a number with a point.
        choices: values that it may have.
        kinds: of data on which it has a meaning.
        parse: turns the word into the value; raises ValueError with what is wrong.
        free: whether a run may be resumed with another value.
        shape: whether it shapes the network.
        flag: as a user gives it, where the field has another name.
        metavar: of its value in ``--help``.
        further: see `Option`.
    """
    declared = Option(
        help, range, tuple(choices), kinds, parse, free, shape=shape, flag=flag or "", metavar=metavar, **further
    )
    return field(default=default, metadata={"help": help, "option": declared})


def operand(help: str, metavar: str, nargs: Optional[str] = None, parse: Callable[[str], Any] = Path) -> Any:
    """Declare what a command takes without a flag as a field of a dataclass; arguments as those of ``add_argument``."""
    return field(default=None, metadata={"operand": {"help": help, "metavar": metavar, "nargs": nargs, "type": parse}})


of_this_call = functools.partial(opt, recorded=False)
"""Declares an option that a run may be resumed with or without, and that run.json does not name."""


def options_of(declaring: Any) -> Mapping[str, Option]:
    """Return the options that a dataclass declares, by their fields' names, in their order."""
    return _options_of(declaring)


@functools.cache
def _options_of(declaring: Hashable) -> Mapping[str, Option]:
    hints = get_type_hints(declaring)
    declared = [each for each in dataclasses.fields(cast(Any, declaring)) if "option" in each.metadata]
    return {
        each.name: dataclasses.replace(
            each.metadata["option"],
            name=each.name,
            flag=each.metadata["option"].flag or flag(each.name),
            default=each.default,
            type=_without_none(hints[each.name]),
        )
        for each in declared
    }


def ranges_of(*declaring: type) -> dict[str, Range]:
    """Return flag -> range of all options of some dataclasses that have one."""
    options = (option for each in declaring for option in options_of(each).values())
    return {option.flag: option.range for option in options if option.range is not None}


def choices_of(*declaring: type) -> dict[str, tuple[str, ...]]:
    """Return flag -> choices of all options of some dataclasses that have any."""
    options = (option for each in declaring for option in options_of(each).values())
    return {option.flag: option.choices for option in options if option.choices}


def flags_of(*declaring: type) -> tuple[str, ...]:
    """Return the flags of the options of some dataclasses, each once, in their order."""
    return tuple(dict.fromkeys(option.flag for each in declaring for option in options_of(each).values()))


def struct_of(*declaring: type, base: type = Struct, required: Sequence[str] = (), are_optional: bool = False) -> Any:
    """Return the type by which a file's options are read: msgspec checks them against their declarations.

    Args:
        declaring: dataclasses with the options.
        base: of the type.
        required: options that the file must have.
        are_optional: whether one that is not given is None, rather than its default.
    """
    fields: list[Any] = []
    for name, option in (item for each in declaring for item in options_of(each).items()):
        if name in required:
            fields.append((name, _file_type(option)))
        elif are_optional or option.default is None:
            fields.append((name, Optional[_file_type(option)], None))
        else:
            fields.append((name, _file_type(option), option.default))
    return defstruct(declaring[0].__name__, fields, bases=(base,), kw_only=True)


def _file_type(option: Option) -> Any:
    if option.choices:
        return Literal[option.choices]
    if option.range is not None:
        least, most = "gt" if option.range.above else "ge", "lt" if option.range.below else "le"
        bounds: dict[str, Any] = {least: option.range.least, most: option.range.most}
        return Annotated[option.type, Meta(**bounds)]
    return Annotated[str, Meta(max_length=LONGEST_TEXT)] if option.type is str else option.type


def _without_none(annotated: Any) -> Any:
    """``Optional[int]`` -> ``int``."""
    kinds = [kind for kind in get_args(annotated) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 and type(None) in get_args(annotated) else annotated


def utf8_path(text: str) -> Path:
    """Return the path that a text is, for what fairseq or a record has to name: neither can name other bytes."""
    return Path(utf8_word(text))


def utf8_word(text: str) -> str:
    """Return a text that a record can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        needed = "a name in UTF-8 is needed"
        if _is_utf8(os.fsencode(text)):
            needed = "which a locale of ASCII cannot name; set LC_ALL=C.UTF-8"
        raise argparse.ArgumentTypeError(f"{text!r} found, {needed}") from error
    return text


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


Own = TypeVar("Own", bound="Options")


class Options:
    """What frozen dataclasses of options derive from."""

    @classmethod
    def add_to(cls, group: Any, kind: Optional[str] = None) -> None:
        """Add the options to a group of argparse's parser.

        Args:
            group: of the parser.
            kind: of data that the group is about, which leaves out what means nothing there; None: all.
        """
        for option in options_of(cls).values():
            if option.side != TRAINING and (kind is None or kind in option.kinds):
                option.add_to(group, kind)

    @classmethod
    def operands(cls) -> dict[str, dict[str, Any]]:
        """Return the fields that `operand` made, and what it was told."""
        every = dataclasses.fields(cast(Any, cls))
        return {each.name: each.metadata["operand"] for each in every if "operand" in each.metadata}

    @classmethod
    def read(cls: type[Own], arguments: argparse.Namespace, **further: Any) -> Own:
        """Make it of what the user gave, of defaults, and of ``further`` fields that are no options."""
        names = [name for name, option in options_of(cls).items() if option.side != TRAINING] + [*cls.operands()]
        found = {name: vars(arguments).get(name) for name in names}
        return cls(**{name: value for name, value in found.items() if value is not None}, **further)

    def record(self, kind: Optional[str] = None) -> dict[str, Any]:
        """Return what run.json says of a run on a kind of data (None: any): what has a value."""
        return {name: value for name, value in self._recorded(kind) if value is not None}

    def _recorded(self, kind: Optional[str]) -> Iterator[tuple[str, Any]]:
        """Each option that run.json knows, with its value as JSON has it."""
        for name, option in options_of(type(self)).items():
            value = getattr(self, name)
            if not option.recorded or option.side == TRAINING or not (kind is None or kind in option.kinds):
                continue
            if isinstance(value, (tuple, Path)):
                value = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            yield name, None if option.quiet and value == option.default else value

    def words(self) -> list[str]:
        """Return what was given, and is not the default, as words for fairseq-train."""
        words: list[str] = []
        for name, option in options_of(type(self)).items():
            value = getattr(self, name)
            if value is not None and value is not False and value != option.default and option.side != PLAN:
                words += [option.flag] if value is True else [option.flag, str(value)]
        return words


def _is_option(word: str) -> bool:
    """Tell an option from a value; a negative number is a value."""
    return word.startswith("-") and not word[1:2].isdigit() and not word.startswith("-.") and word != "-"


def group_words(words: Sequence[str]) -> list[GivenOption]:
    """Group words into options with their values; ``--name=value`` is split."""
    options: list[GivenOption] = []
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
