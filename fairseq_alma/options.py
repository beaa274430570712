"""Declare each option once, as a dataclass field made by `opt`.

Argument parsers, fairseq configurations and the types of JSON records are generated from the declarations. A
declaration also says whether run.json records the option, whether a resumed run may change the option, and whether the
option shapes the network. This module imports neither torch nor fairseq.
"""

import argparse
import dataclasses
import functools
import math
import typing
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Callable, Literal, Mapping, Optional, Sequence, TypeVar, Union, get_args, get_origin

from msgspec import Meta, Struct, defstruct

KINDS = ("text", "images")
"""Kind of data of a stream."""
PLAN, TRAINING = "plan", "training"
"""Command that accepts an option: alma-stream (`PLAN`) or fairseq-train (`TRAINING`)."""
NONE = "none"
"""Value of an option with choices if the user does not give it, in fairseq's parser and checkpoint configurations."""
Number = Union[int, float]
GivenOption = tuple[str, tuple[str, ...]]
"""An option of a command line with its values."""
SHORT = {"-a": "--arch", "--max-sentences": "--batch-size", "--max-sentences-valid": "--batch-size-valid"}
"""Aliases of options of fairseq."""
LARGEST_COUNT = 2**31 - 1
LONGEST_TEXT = 2**26
"""Maximum number of characters of a value in a file."""


@dataclass(frozen=True)
class Range:
    """A range of numbers without NaN; an instance is a ``type`` for argparse, which converts a word to a number.

    Attributes:
        least: lower limit.
        most: upper limit.
        is_integer: whether the range contains only integers.
        above: whether the lower limit is excluded.
        below: whether the upper limit is excluded.
    """

    least: Number
    most: Number = LARGEST_COUNT
    is_integer: bool = True
    above: bool = False
    below: bool = False

    def read(self, text: str) -> Number:
        """Convert a text to a number. Raises ValueError with the rule if the number is not in the range."""
        try:
            value = int(text) if self.is_integer else float(text)
        except ValueError as error:
            raise ValueError(f"a {'whole ' if self.is_integer else ''}number is needed") from error
        self.check(value)
        return value

    def check(self, value: Number) -> None:
        """Raise ValueError with the rule if a number is not in the range."""

        def bound(number: Number) -> str:
            return f"{number:,}" if isinstance(number, int) or abs(number) < 1e6 else f"{number:g}"

        if math.isnan(value):
            raise ValueError("a number is needed")
        if value < self.least or (self.above and value == self.least):
            raise ValueError(f"a number {'above' if self.above else 'of at least'} {bound(self.least)} is needed")
        if value > self.most or (self.below and value == self.most):
            raise ValueError(f"a number {'below' if self.below else 'of at most'} {bound(self.most)} is needed")

    def __call__(self, text: str) -> Number:
        try:
            return self.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text} found, {error}") from error


def integer(least: int = 1, most: int = LARGEST_COUNT) -> Range:
    """Return a range of integers."""
    return Range(least, most)


def real(least: Number = 0, most: Number = 1e30, above: bool = False, below: bool = False) -> Range:
    """Return a range of real numbers."""
    return Range(least, most, is_integer=False, above=above, below=below)


def flag(name: str) -> str:
    """Return the flag of a field: ``grow_every`` -> ``--grow-every``."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Option:
    """The declaration of an option, made by `opt` and returned by `options_of`.

    Attributes:
        help: help text with the unit.
        range: range of the value, or of each value of a list.
        choices: permitted values; empty if all values are permitted.
        kinds: kinds of data that support the option.
        parse: function that converts the word to the value; raises ValueError with the rule.
        free: whether a resumed run may have another value.
        recorded: whether run.json contains the option.
        shape: whether the option shapes the network; an initial checkpoint must have the same value.
        side: command that accepts the option, `PLAN` or `TRAINING`; None for both commands.
        quiet: whether run.json has null instead of the default.
        trait: attribute of the learners with this option; ``{learners}`` in the help is replaced by learner names.
        metavar: name of the value in ``--help``.
        defaults: kind of data -> default for this kind, if it differs from the default of the field.
        name: name of the field.
        flag: flag on the command line.
        default: default of the field; ``MISSING``: the option is required.
        type: type of the value, without ``Optional``.
    """

    help: str
    range: Optional[Range] = None
    choices: tuple[str, ...] = ()
    kinds: tuple[str, ...] = KINDS
    parse: Optional[Callable[[str], Any]] = None
    free: bool = False
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
        """Return the default for a kind of data."""
        return self.default if kind is None else self.defaults.get(kind, self.default)

    def value(self, given: Any) -> Any:
        """Convert a word to a value, or check a value. Raises ValueError with a message that begins with the flag."""
        try:
            if not isinstance(given, str):
                for number in given if isinstance(given, (list, tuple)) else (given,):
                    if self.range is not None:
                        self.range.check(number)
                return given
            if self.parse is not None:
                return self.parse(given)
            if self.choices and given not in self.choices:
                raise ValueError(f"choose from {', '.join(self.choices)}")
            if self.range is not None:
                return self.range.read(given)
            if int in (self.type, *get_args(self.type)):
                return Range(-math.inf, math.inf).read(given)
            return Path(given) if self.type is Path else given
        except ValueError as error:
            raise ValueError(f"{self.flag} {given}: {error}") from error

    def add_to(self, group: Any, kind: Optional[str] = None) -> None:
        """Add the option to a group of a parser; its value is None if the user does not give the option.

        Args:
            group: group of the parser.
            kind: kind of data of the group; None to name the kind of data in the help.
        """
        about = f"{self.kinds[0]}: " if len(self.kinds) == 1 and kind is None else ""
        shown = f"{about}{self.help}{self.shown_default(kind)}".replace("%", "%%")
        shown = argparse.SUPPRESS if self.help == argparse.SUPPRESS else shown
        words: dict[str, Any] = {"dest": self.name, "default": None, "help": shown}
        words |= {"required": True} if self.default is MISSING else {}
        if self.type is bool:
            group.add_argument(self.flag, action="store_true", **words)
            return
        words |= {"choices": [*self.choices]} if self.choices else {"metavar": self.metavar or "N"}
        words |= {"nargs": "*"} if get_origin(self.type) is tuple and self.parse is None else {}
        group.add_argument(self.flag, action=_Read, option=self, **words)

    def shown_default(self, kind: Optional[str] = None) -> str:
        """Return `` (default: X)``; an empty text if there is no default or the help contains the default."""
        default = self.default_on(kind)
        is_none = default is None or default is False or default is MISSING
        return "" if is_none or "default:" in self.help else f" (default: {default})"


class _Read(argparse.Action):
    """Action of argparse that stores the value of an option."""

    def __init__(self, *arguments: Any, option: Option, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.option = option

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        try:
            value = self.option.value
            setattr(namespace, self.dest, value(values) if isinstance(values, str) else tuple(map(value, values)))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from error
        except ValueError as error:
            parser.error(str(error))


def opt(default: Any, help: str, *, flag: Optional[str] = None, choices: Sequence[str] = (), **further: Any) -> Any:
    """Declare an option as a dataclass field; the flag of the field ``grow_every`` is ``--grow-every``.

    Args:
        default: default value; ``MISSING`` for a required option.
        help: help text with the unit; the default is appended.
        flag: flag, if it differs from the field name.
        choices: permitted values.
        further: other attributes of `Option`; a real number needs a ``range``.
    """
    declared = Option(help, choices=tuple(choices), flag=flag or "", **further)
    return field(default=default, metadata={"help": help, "option": declared})


of_this_call = functools.partial(opt, recorded=False)
"""Declare an option that run.json does not record, so that each call may set another value."""


def operand(help: str, metavar: str, nargs: Optional[str] = None, parse: Callable[[str], Any] = Path) -> Any:
    """Declare a positional argument as a dataclass field, with the arguments of ``add_argument``."""
    return field(default=None, metadata={"operand": {"help": help, "metavar": metavar, "nargs": nargs, "type": parse}})


def _options_of(declaring: Any) -> Mapping[str, Option]:
    found, hints = {}, typing.get_type_hints(declaring)
    for each in dataclasses.fields(declaring):
        if declared := each.metadata.get("option"):
            kinds = [kind for kind in get_args(hints[each.name]) if kind is not NoneType]
            is_optional = len(kinds) == 1 and NoneType in get_args(hints[each.name])
            found[each.name] = dataclasses.replace(
                declared,
                name=each.name,
                flag=declared.flag or flag(each.name),
                default=each.default,
                type=kinds[0] if is_optional else hints[each.name],
            )
    return found


options_of: Callable[[Any], Mapping[str, Option]] = functools.cache(_options_of)
"""Return the options of a dataclass in order (field name -> option)."""


def flags_of(*declaring: type) -> tuple[str, ...]:
    """Return the distinct flags of the options of some dataclasses, in order."""
    return tuple(dict.fromkeys(option.flag for each in declaring for option in options_of(each).values()))


def struct_of(declaring: type, base: type = Struct, required: Sequence[str] = ()) -> Any:
    """Return the msgspec type for the options of a dataclass in a JSON file.

    Args:
        declaring: dataclass that declares the options.
        base: base class of the type.
        required: names of options that the file must contain.
    """
    fields: list[Any] = []
    for name, option in options_of(declaring).items():
        kind = Annotated[str, Meta(max_length=LONGEST_TEXT)] if option.type is str else option.type
        if option.choices:
            kind = Literal[option.choices]
        elif option.range is not None:
            least, most = "gt" if option.range.above else "ge", "lt" if option.range.below else "le"
            bounds: dict[str, Any] = {least: option.range.least, most: option.range.most}
            kind = Annotated[option.type, Meta(**bounds)]
        kind = Optional[kind] if option.default is None and name not in required else kind
        fields.append((name, kind) if name in required else (name, kind, option.default))
    return defstruct(declaring.__name__, fields, bases=(base,), kw_only=True)


def utf8_word(text: str) -> str:
    """Return the text unchanged. Raises ArgumentTypeError if it is not valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} found, a name in UTF-8 is needed") from error
    return text


def utf8_path(text: str) -> Path:
    """Convert a text to a path. Raises ArgumentTypeError if the text is not valid UTF-8."""
    return Path(utf8_word(text))


Own = TypeVar("Own", bound="Options")


class Options:
    """Base class of dataclasses that declare options."""

    @classmethod
    def add_to(cls, group: Any, kind: Optional[str] = None) -> None:
        """Add the options for a kind of data (None for all kinds) to a group of a parser."""
        for option in options_of(cls).values():
            if option.side != TRAINING and (kind is None or kind in option.kinds):
                option.add_to(group, kind)

    @classmethod
    def operands(cls) -> dict[str, dict[str, Any]]:
        """Return the positional arguments (field name -> arguments of ``add_argument``)."""
        every: Any = cls
        return {each.name: each.metadata["operand"] for each in dataclasses.fields(every) if "operand" in each.metadata}

    @classmethod
    def read(cls: type[Own], arguments: argparse.Namespace, **further: Any) -> Own:
        """Return an instance with the parsed arguments, defaults, and ``further`` fields that are not options."""
        names = [name for name, option in options_of(cls).items() if option.side != TRAINING] + [*cls.operands()]
        found = {name: vars(arguments).get(name) for name in names}
        return cls(**{name: value for name, value in found.items() if value is not None}, **further)

    def recorded(self, kind: Optional[str] = None) -> dict[str, Any]:
        """Return the options that run.json records for a kind of data (None for any kind), including null values."""
        found = {}
        for name, option in options_of(type(self)).items():
            if option.recorded and option.side != TRAINING and (kind is None or kind in option.kinds):
                value = getattr(self, name)
                if isinstance(value, (tuple, Path)):
                    value = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                found[name] = None if option.quiet and value == option.default else value
        return found

    def record(self, kind: Optional[str] = None) -> dict[str, Any]:
        """Return the options that run.json records for a kind of data (None for any kind), without null values."""
        return {name: value for name, value in self.recorded(kind).items() if value is not None}

    def words(self) -> list[str]:
        """Return the options that differ from their defaults, as command-line words for fairseq-train."""
        words: list[str] = []
        for name, option in options_of(type(self)).items():
            value = getattr(self, name)
            if value is not None and value is not False and value != option.default and option.side != PLAN:
                words += [option.flag] if value is True else [option.flag, str(value)]
        return words


def _is_option(word: str) -> bool:
    """Return whether a word is an option; a negative number is a value."""
    return word.startswith("-") and not word[1:2].isdigit() and not word.startswith("-.") and word != "-"


def group_words(words: Sequence[str]) -> list[GivenOption]:
    """Group words into options with their values; split ``--name=value``."""
    options: list[GivenOption] = []
    for word in words:
        if _is_option(word):
            name, equals, value = word.partition("=")
            options.append((SHORT.get(name, name), (value,) if equals else ()))
        elif options:
            options[-1] = (options[-1][0], (*options[-1][1], word))
        else:
            raise ValueError(f"{word!r} after -- is not an option; give options of fairseq-train")
    return options


def without(words: Sequence[str], left_out: Mapping[str, Optional[int]]) -> list[str]:
    """Return a command line without some options.

    Args:
        words: the command line.
        left_out: option name -> number of value words; None for all words up to the next option.
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
