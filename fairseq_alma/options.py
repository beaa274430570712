"""Options: each is declared once, as a field of a dataclass made by `opt`.

The field has its flag, help, range, choices, kinds of data, whether run.json names it and whether it binds the run,
and whether it shapes the network; parsers, fairseq's configurations and the check of records read them here. Neither
torch nor fairseq: a dry run imports neither.
"""

import argparse
import dataclasses
import functools
import math
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
"""Other names of fairseq's options."""
LARGEST_COUNT = 2**31 - 1
LONGEST_TEXT = 2**26
"""Characters of a value in a file."""


@dataclass(frozen=True)
class Range:
    """The numbers from ``least`` to ``most``; NaN is in no range.

    Attributes:
        least: smallest number.
        most: largest number.
        is_integer: whether only whole numbers are in it.
        above: whether ``least`` itself is excluded.
        below: whether ``most`` itself is excluded.
    """

    least: Number
    most: Number = LARGEST_COUNT
    is_integer: bool = True
    above: bool = False
    below: bool = False

    def read(self, text: str) -> Number:
        """Return the number that a text represents. Raises ValueError with the rule if it is not in the range."""
        try:
            value = int(text) if self.is_integer else float(text)
        except ValueError as error:
            raise ValueError(f"a {'whole ' if self.is_integer else ''}number is needed") from error
        self.check(value)
        return value

    def check(self, value: Number) -> None:
        """Raise ValueError with the rule if a number is not in the range."""
        if math.isnan(value):
            raise ValueError("a number is needed")
        if value < self.least or (self.above and value == self.least):
            raise ValueError(f"a number {'above' if self.above else 'of at least'} {_format(self.least)} is needed")
        if value > self.most or (self.below and value == self.most):
            raise ValueError(f"a number {'below' if self.below else 'of at most'} {_format(self.most)} is needed")


def _format(number: Number) -> str:
    """Format a bound: ``1,000,000``, ``0.5``, ``1e+30``."""
    return f"{number:,}" if isinstance(number, int) or abs(number) < 1e6 else f"{number:g}"


class InRange:
    """The type of an option that is a number of a range, for ``add_argument(type=...)``."""

    def __init__(self, bounds: Range) -> None:
        self.bounds = bounds

    def __call__(self, text: str) -> Number:
        try:
            return self.bounds.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text} found, {error}") from error


def integer(least: int = 1, most: int = LARGEST_COUNT) -> Range:
    """Return a range of whole numbers."""
    return Range(least, most)


def real(least: Number = 0, most: Number = 1e30, above: bool = False, below: bool = False) -> Range:
    """Return a range of real numbers."""
    return Range(least, most, is_integer=False, above=above, below=below)


def flag(name: str) -> str:
    """Return the flag of a field: ``grow_every`` -> ``--grow-every``."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Option:
    """The declaration of an option; `opt` makes it, `options_of` finds it.

    Attributes:
        help: what it means, with its unit.
        range: of its number, or of each of its numbers.
        choices: values that it may have; empty: any.
        kinds: of data on which it has a meaning.
        parse: converts the word to the value; raises ValueError with the rule.
        free: whether a run may be resumed with another value.
        recorded: whether run.json names it.
        shape: whether it shapes the network, so that a checkpoint to start from must share it.
        side: on which it is an option: `PLAN` or `TRAINING`; None: on both.
        quiet: whether run.json has null where it has its default.
        trait: attribute of the learners to which it applies; ``{learners}`` in the help is replaced by their names.
        metavar: of its value in ``--help``.
        defaults: kind of data -> default, where it is not the field's.
        name: of the field.
        flag: as a user gives it.
        default: the field's; ``MISSING``: it must be given.
        type: of the value, ``Optional`` removed.
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
        """Return the default on a kind of data."""
        return self.defaults.get(kind, self.default) if kind is not None else self.default

    def value(self, given: Any) -> Any:
        """Convert a word to a value, or check a value. Raises ValueError, which begins with the flag."""
        try:
            if not isinstance(given, str):
                if self.range is not None:
                    for number in given if isinstance(given, (list, tuple)) else (given,):
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
        """Add it to a group of a parser; its value is None where it is not given, and checked while it is parsed.

        Args:
            group: of the parser.
            kind: of data that the group is about; None: the help names it.
        """
        about = f"{self.kinds[0]}: " if len(self.kinds) == 1 and kind is None else ""
        shown = f"{about}{self.help}{self.shown_default(kind)}".replace("%", "%%")
        shown = argparse.SUPPRESS if self.help == argparse.SUPPRESS else shown
        words: dict[str, Any] = {"dest": self.name, "default": None, "help": shown}
        if self.default is MISSING:
            words["required"] = True
        if self.type is bool:
            group.add_argument(self.flag, action="store_true", **words)
            return
        words |= {"choices": [*self.choices]} if self.choices else {"metavar": self.metavar or "N"}
        words |= {"nargs": "*"} if get_origin(self.type) is tuple and self.parse is None else {}
        group.add_argument(self.flag, action=_Read, option=self, **words)

    def shown_default(self, kind: Optional[str] = None) -> str:
        """Return `` (default: X)``; empty if there is none or the help has it."""
        default = self.default_on(kind)
        is_none = default is None or default is False or default is MISSING
        return "" if is_none or "default:" in self.help else f" (default: {default})"


class _Read(argparse.Action):
    """Stores the value of an option's words."""

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
    """Declare an option as a field of a dataclass; field ``grow_every`` is ``--grow-every``.

    Args:
        default: its value where the user gives none; ``MISSING``: it must be given.
        help: what it means, with its unit; the default is added to it.
        flag: as a user gives it, where the field has another name.
        choices: values that it may have.
        further: see `Option`; a number with a point needs a ``range``.
    """
    declared = Option(help, choices=tuple(choices), flag=flag or "", **further)
    return field(default=default, metadata={"help": help, "option": declared})


of_this_call = functools.partial(opt, recorded=False)
"""Declares an option that a run may be resumed with or without, and that run.json does not name."""


def operand(help: str, metavar: str, nargs: Optional[str] = None, parse: Callable[[str], Any] = Path) -> Any:
    """Declare a positional argument as a field of a dataclass; arguments as those of ``add_argument``."""
    return field(default=None, metadata={"operand": {"help": help, "metavar": metavar, "nargs": nargs, "type": parse}})


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


def _without_none(annotated: Any) -> Any:
    """Convert ``Optional[int]`` to ``int``."""
    kinds = [kind for kind in get_args(annotated) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 and type(None) in get_args(annotated) else annotated


def flags_of(*declaring: type) -> tuple[str, ...]:
    """Return the flags of the options of some dataclasses, each once, in their order."""
    return tuple(dict.fromkeys(option.flag for each in declaring for option in options_of(each).values()))


def struct_of(*declaring: type, base: type = Struct, required: Sequence[str] = ()) -> Any:
    """Return the msgspec type by which a file's options are read and checked.

    Args:
        declaring: dataclasses with the options.
        base: of the type.
        required: options that the file must have; others have their defaults.
    """
    fields: list[Any] = []
    for name, option in (item for each in declaring for item in options_of(each).items()):
        if name in required:
            fields.append((name, _file_type(option)))
        elif option.default is None:
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


def utf8_path(text: str) -> Path:
    """Return a path whose name is UTF-8, for what fairseq or a record has to name."""
    return Path(utf8_word(text))


def utf8_word(text: str) -> str:
    """Return a text that is UTF-8, for a record."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} found, a name in UTF-8 is needed") from error
    return text


Own = TypeVar("Own", bound="Options")


class Options:
    """Base class of dataclasses of options."""

    @classmethod
    def add_to(cls, group: Any, kind: Optional[str] = None) -> None:
        """Add the options to a group of argparse's parser, on a kind of data (None: any) those that it has."""
        for option in options_of(cls).values():
            if option.side != TRAINING and (kind is None or kind in option.kinds):
                option.add_to(group, kind)

    @classmethod
    def operands(cls) -> dict[str, dict[str, Any]]:
        """Return the fields that `operand` made, with its arguments."""
        every = dataclasses.fields(cast(Any, cls))
        return {each.name: each.metadata["operand"] for each in every if "operand" in each.metadata}

    @classmethod
    def read(cls: type[Own], arguments: argparse.Namespace, **further: Any) -> Own:
        """Make an instance of parsed arguments, of defaults, and of ``further`` fields that are no options."""
        names = [name for name, option in options_of(cls).items() if option.side != TRAINING] + [*cls.operands()]
        found = {name: vars(arguments).get(name) for name in names}
        return cls(**{name: value for name, value in found.items() if value is not None}, **further)

    def record(self, kind: Optional[str] = None) -> dict[str, Any]:
        """Return the options that run.json names on a kind of data (None: any), those that have a value."""
        return {name: value for name, value in self._recorded(kind) if value is not None}

    def _recorded(self, kind: Optional[str]) -> Iterator[tuple[str, Any]]:
        for name, option in options_of(type(self)).items():
            value = getattr(self, name)
            if not option.recorded or option.side == TRAINING or not (kind is None or kind in option.kinds):
                continue
            if isinstance(value, (tuple, Path)):
                value = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            yield name, None if option.quiet and value == option.default else value

    def words(self) -> list[str]:
        """Return the options that differ from their defaults as words for fairseq-train."""
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
    """Return a command line without some options.

    Args:
        words: the command line.
        left_out: their names, and how many words follow each; None: all up to the next option.
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
