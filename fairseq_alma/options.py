"""Declare each option once, as a dataclass field made by `opt`.

Argument parsers, fairseq configurations and the types of JSON records are generated from the declarations. A
declaration also defines whether run.json records the option, whether a resumed run may change the option, and whether
the option affects the shape of the network. This module imports neither torch nor fairseq.
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

from msgspec import Meta, defstruct

KINDS = ("text", "images")  # kinds of data in a stream
PLAN, TRAINING = "plan", "training"  # commands that accept options: alma-stream and fairseq-train
NONE = "none"  # value in fairseq's configurations for an option with choices that the user does not give
Number = Union[int, float]
GivenOption = tuple[str, tuple[str, ...]]  # an option on a command line: (flag, values)
# aliases of fairseq options (alias -> flag)
SHORT = {"-a": "--arch", "--max-sentences": "--batch-size", "--max-sentences-valid": "--batch-size-valid"}
LARGEST_COUNT = 2**31 - 1


@dataclass(frozen=True)
class Range:
    """A range of numbers that excludes NaN. As ``type`` of an argparse argument, a range converts a string to a number.

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
        """Convert a string to a number. Raises ValueError if the string is not a number in the range."""
        try:
            value = int(text) if self.is_integer else float(text)
        except ValueError as error:
            raise ValueError(f"expected {'an integer' if self.is_integer else 'a number'}") from error
        self.check(value)
        return value

    def check(self, value: Number) -> None:
        """Raise ValueError if a number is out of range. The message states the violated limit."""
        if math.isnan(value):
            raise ValueError("expected a number")
        if value < self.least or (self.above and value == self.least):
            limit, rule = self.least, "above" if self.above else "of at least"
        elif value > self.most or (self.below and value == self.most):
            limit, rule = self.most, "below" if self.below else "of at most"
        else:
            return
        shown = f"{limit:,}" if isinstance(limit, int) or abs(limit) < 1e6 else f"{limit:g}"
        raise ValueError(f"expected a number {rule} {shown}")

    def __call__(self, text: str) -> Number:
        try:
            return self.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}, found {text}") from error


def integer(least: int = 1, most: int = LARGEST_COUNT) -> Range:
    """Return the range of integers from ``least`` to ``most``, both included."""
    return Range(least, most)


def real(least: Number = 0, most: Number = 1e30, above: bool = False, below: bool = False) -> Range:
    """Return the range of real numbers from ``least`` to ``most``; ``above`` and ``below`` exclude the limits."""
    return Range(least, most, is_integer=False, above=above, below=below)


def any_path(text: str) -> Path:
    """Convert a string to a path. Raises ArgumentTypeError if the string is empty."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, found an empty string")
    return Path(text)


def flag(name: str) -> str:
    """Return the flag of a dataclass field, such as ``--grow-every`` for ``grow_every``."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Option:
    """The declaration of an option, made by `opt` and returned by `options_of`.

    Attributes:
        help: help text with the unit.
        range: range of the value, or of each value of a list.
        choices: permitted values; empty if all values are permitted.
        kinds: kinds of data to which the option applies: ``text``, ``images`` or both.
        parse: function that converts a string to the value; a ValueError describes the strings that are permitted.
        free: whether a resumed run may change the value.
        recorded: whether run.json contains the option.
        shape: whether the option affects the shape of the network; an initial checkpoint must then have the same value.
        side: the only command that accepts the option, `PLAN` or `TRAINING`; None if both commands accept it.
        trait: name of a boolean attribute of learners; only learners with a true attribute support the option. In the
            help, the names of these learners replace ``{learners}``.
        metavar: name of the value in ``--help``.
        defaults: kind of data, or `TRAINING` (for fairseq-train) -> default value, if it differs from ``default``.
        name: name of the field.
        flag: flag on the command line; empty in a declaration if it follows from the name of the field.
        default: default value; ``MISSING`` if the option is required.
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
    trait: Optional[str] = None
    metavar: Optional[str] = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    flag: str = ""
    default: Any = None
    type: Any = str

    def default_on(self, kind: str) -> Any:
        """Return the default value for a kind of data or `TRAINING`."""
        return self.defaults.get(kind, self.default)

    def value(self, given: Any) -> Any:
        """Convert a string to the option's type; check the range. The message of a ValueError begins with the flag."""
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
            return any_path(given) if self.type is Path else given
        except ValueError as error:
            raise ValueError(f"{self.flag} {given}: {error}") from error

    def add_to(self, group: Any) -> None:
        """Add the option to a parser or group; the parsed value is None if the user does not give the option.

        If only one kind of data supports the option, the help names this kind.
        """
        words: dict[str, Any] = {"dest": self.name, "default": None, "required": self.default is MISSING}
        shown = f"{self.kinds[0]}: {self.help}" if len(self.kinds) == 1 else self.help
        if self.choices and len(" ".join([self.flag, *self.choices])) > 26:  # for the left column of --help
            before, separator, after = shown.partition(" (default: ")
            shown = f"{before} {{{','.join(self.choices)}}}{separator}{after}"
            words["metavar"] = "NAME"
        if "default:" not in self.help and not any(self.default is each for each in (None, False, MISSING)):
            shown += f" (default: {self.default})"
        words["help"] = shown.replace("%", "%%")
        if self.type is bool:
            group.add_argument(self.flag, action="store_true", **words)
            return
        words |= {"choices": [*self.choices]} if self.choices else {"metavar": self.metavar or "N"}
        words |= {"nargs": "+"} if get_origin(self.type) is tuple and self.parse is None else {}
        group.add_argument(self.flag, action=_Read, option=self, **words)


class _Read(argparse.Action):
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


def opt(default: Any, help: str, *, choices: Sequence[str] = (), **further: Any) -> Any:
    """Declare an option as a dataclass field; the flag of the field ``grow_every`` is ``--grow-every``.

    Args:
        default: default value; ``MISSING`` for a required option.
        help: help text with the unit; ``--help`` appends the default.
        choices: permitted values; empty if all values are permitted.
        further: other attributes of `Option`; ``range`` is required for real numbers.
    """
    return field(default=default, metadata={"help": help, "option": Option(help, choices=tuple(choices), **further)})


# Declare an option that run.json does not record, so that the value may differ between calls of the command.
of_this_call = functools.partial(opt, recorded=False)


def operand(help: str, metavar: str, nargs: Optional[str] = None, parse: Callable[[str], Any] = any_path) -> Any:
    """Declare a positional argument as a dataclass field. For the parameters, see ``add_argument`` of argparse."""
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


# Return field name -> `Option` for the options of a dataclass, in the order of declaration.
# mypy does not accept a class as the argument of a function with the decorator functools.cache.
options_of: Callable[[Any], Mapping[str, Option]] = functools.cache(_options_of)


def flags_of(*declaring: type) -> tuple[str, ...]:
    """Return the distinct flags of the options that dataclasses declare, in the order of declaration."""
    return tuple(dict.fromkeys(option.flag for each in declaring for option in options_of(each).values()))


def struct_of(declaring: type, required: Sequence[str] = ()) -> Any:
    """Return the msgspec type of a JSON object with the options of a dataclass.

    Args:
        declaring: dataclass that declares the options.
        required: names of the options that the JSON object must have.
    """
    fields: list[Any] = []
    for name, option in options_of(declaring).items():
        kind = Annotated[str, Meta(max_length=2**26)] if option.type is str else option.type
        if option.choices:
            kind = Literal[option.choices]
        elif option.range is not None:
            least, most = "gt" if option.range.above else "ge", "lt" if option.range.below else "le"
            bounds: dict[str, Any] = {least: option.range.least, most: option.range.most}
            kind = Annotated[option.type, Meta(**bounds)]
        kind = Optional[kind] if option.default is None and name not in required else kind
        fields.append((name, kind) if name in required else (name, kind, option.default))
    return defstruct(declaring.__name__, fields, kw_only=True)


def utf8_word(text: str) -> str:
    """Return a string unchanged. Raises ArgumentTypeError if the string is not valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"expected a name in UTF-8, found {text!r}") from error
    return text


def utf8_path(text: str) -> Path:
    """Convert a string to a path. Raises ArgumentTypeError if the string is empty or not valid UTF-8."""
    return any_path(utf8_word(text))


Own = TypeVar("Own", bound="Options")


class Options:
    """Base class of dataclasses that declare options."""

    @classmethod
    def add_to(cls, group: Any) -> None:
        """Add positional arguments and options to a parser."""
        for each in dataclasses.fields(cls):  # type: ignore[arg-type]
            if words := each.metadata.get("operand"):
                group.add_argument(each.name, **words)
        for option in options_of(cls).values():
            if option.side != TRAINING:
                option.add_to(group)

    @classmethod
    def read(cls: type[Own], arguments: argparse.Namespace, **further: Any) -> Own:
        """Return an instance with the parsed values or the defaults. ``further`` sets fields that are not options."""
        names = [each.name for each in dataclasses.fields(cls) if "operand" in each.metadata]  # type: ignore[arg-type]
        names += [name for name, option in options_of(cls).items() if option.side != TRAINING]
        found = {name: vars(arguments).get(name) for name in names}
        return cls(**{name: value for name, value in found.items() if value is not None}, **further)

    def record(self, kind: Optional[str] = None) -> dict[str, Any]:
        """Return the values for run.json by option name, without None. If ``kind`` is None, include all options."""
        found = {}
        for name, option in options_of(type(self)).items():
            value = getattr(self, name)
            is_used = option.recorded and option.side != TRAINING and (kind is None or kind in option.kinds)
            if is_used and value is not None:
                value = ",".join(map(str, value)) if isinstance(value, tuple) else value
                found[name] = str(value) if isinstance(value, Path) else value
        return found

    def words(self) -> list[str]:
        """Return the options that differ from their defaults, as command-line arguments for fairseq-train."""
        words: list[str] = []
        for name, option in options_of(type(self)).items():
            value = getattr(self, name)
            if value is not None and value is not False and value != option.default and option.side != PLAN:
                words += [option.flag] if value is True else [option.flag, str(value)]
        return words


def _is_option(word: str) -> bool:
    # A negative number or ``-`` is not a flag.
    return word.startswith("-") and not word[1:2].isdigit() and not word.startswith("-.") and word != "-"


def group_words(words: Sequence[str]) -> list[GivenOption]:
    """Parse arguments into (flag, values) pairs; replace aliases. Raises ValueError if the first word is not a flag."""
    options: list[GivenOption] = []
    for word in words:
        if _is_option(word):
            name, equals, value = word.partition("=")
            options.append((SHORT.get(name, name), (value,) if equals else ()))
        elif options:
            options[-1] = (options[-1][0], (*options[-1][1], word))
        else:
            raise ValueError(f"{word!r} after --: expected an option of fairseq-train; put the option before its value")
    return options


def given_values(words: Sequence[str]) -> dict[str, str]:
    """Parse arguments as `group_words` does; return flag -> values joined by spaces. The last occurrence counts."""
    return {name: " ".join(values) for name, values in group_words(words)}


def without(words: Sequence[str], *flags: str) -> list[str]:
    """Return command-line arguments without the options ``flags`` and their values."""
    kept, is_kept = [], True
    for word in words:
        if _is_option(word):
            is_kept = word.partition("=")[0] not in flags
        if is_kept:
            kept.append(word)
    return kept
