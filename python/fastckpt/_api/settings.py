"""Options that several functions share, each defined once: its default, its check, its text in help().

A record of settings is a frozen dataclass whose fields are made by :func:`option`. A function accepts the options of a
record as ``**options``, shows them in its signature and docstring by :func:`takes`, and makes the record by
:meth:`Settings.of` before it reads the state. It passes on the whole record.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field, fields
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, get_type_hints

from fastckpt._text import shortened, suggest, visible

if TYPE_CHECKING:
    from typing_extensions import Self

_T = TypeVar("_T")

_OPTION = "option"
#: The most characters of an option that a checkpoint records.
_LONGEST = 250
#: The width of docstring lines.
_WIDTH = 120


class Option(NamedTuple):
    """One option.

    Attributes:
        default: the value without an argument.
        check: called with the operation and the value; returns the value for the record, or raises.
        words: the description of the option, for the docstring.
        alike: whether it must be equal on all ranks of a job.
        late: whether it is checked after all others.
        kept: puts a value other than the default into words, which the checkpoint records; None to record nothing.
    """

    default: Any
    check: Callable[[str, Any], Any]
    words: str
    alike: bool
    late: bool
    kept: Callable[[Any], str] | None


def option(
    default: Any,
    check: Callable[[str, Any], Any],
    words: str,
    *,
    alike: bool = False,
    late: bool = False,
    kept: Callable[[Any], str] | None = None,
) -> Any:
    """A field of a record; see :class:`Option`."""
    return field(metadata={_OPTION: Option(default, check, words, alike, late, kept)})


def as_given(_: str, value: Any) -> Any:
    """The argument, unchecked."""
    return value


def as_bool(_: str, value: Any) -> bool:
    """The truth value of the argument."""
    return bool(value)


def in_short(text: str) -> str:
    """A text in the form that a checkpoint records."""
    return shortened(visible(text), _LONGEST)


class Settings:
    """The base class of records of settings.

    Attributes:
        given: the options as callers give them: a TypedDict with the names of the record, for type checkers.
    """

    __slots__ = ()

    given: ClassVar[type]

    @classmethod
    @cache
    def options(cls) -> Mapping[str, Option]:
        """The options of the record, by name."""
        # Each record is a dataclass.
        return MappingProxyType({one.name: one.metadata[_OPTION] for one in fields(cls)})  # type: ignore[arg-type]

    @classmethod
    def of(cls, operation: str, given: Mapping[str, Any], door: Any = None) -> Self:
        """The record of a caller's arguments.

        Args:
            operation: the word that error messages begin with.
            given: values by name; a missing one gets its default.
            door: the function that the caller called, with the arguments that :func:`takes` shows; without it, the
                options of the record are the arguments.

        Raises:
            TypeError: a name is not one of these arguments.
            Exception: the error of an option's check.
        """
        known = [*cls.options()]
        if door is not None:
            function: Any = vars(door)["__init__"] if isinstance(door, type) else door
            known = [name for name in function.__signature__.parameters if name != "self"]
        for name in given:
            if name not in known:
                raise TypeError(f"{operation}: unexpected keyword argument {name!r}{where(name, known)}")
        checks = sorted(cls.options().items(), key=lambda named: named[1].late)
        return cls(**{name: one.check(operation, given.get(name, one.default)) for name, one in checks})

    def alike(self) -> dict[str, Any]:
        """The options that must be equal on all ranks of a job, by their names in errors."""
        return {f"{name}=": getattr(self, name) for name, one in self.options().items() if one.alike}

    def kept(self) -> list[tuple[str, str]]:
        """The options that a checkpoint keeps, by name, in words."""
        return [
            (name, in_short(one.kept(value)))
            for name, one in self.options().items()
            if one.kept is not None and (value := getattr(self, name)) and value != one.default
        ]


#: Names of arguments in other libraries.
_ELSEWHERE = {
    "map_location": "device=",
    "max_shard_size": "files=fastckpt.Files(shard_size=...)",
    "force": "overwrite=",
}
#: By argument, the class that holds its options, such as ``fastckpt.IO``: the public name, and the class itself.
_RECORDS: dict[str, tuple[str, type]] = {}


def record_of(argument: str, public: str) -> Callable[[type[_T]], type[_T]]:
    """Register the record of options of an argument, so that an error about an option names its record."""

    def note(record: type[_T]) -> type[_T]:
        _RECORDS[argument] = (public, record)
        return record

    return note


def where(name: str, known: Collection[str]) -> str:
    """The end of an error about an unknown argument: where it belongs, its name here, or a similar name."""
    for argument, (public, record) in _RECORDS.items():
        option = inspect.signature(record).parameters.get(name)
        if option is not None and option.kind is not inspect.Parameter.VAR_POSITIONAL:
            whose = f"{argument}={public}({name}=...)" if argument in known else f"{public}, not of this call"
            return f": it is an option of {whose}"
    here = _ELSEWHERE.get(name, "")
    if here.partition("=")[0] in known:
        return f": it is {here} here"
    like = suggest(name, [*known])
    return like if like.startswith(";") else ""


def takes(
    *kinds: type[Settings], like: Mapping[type[Settings], str] | None = None, ranks: bool = False
) -> Callable[[_T], _T]:
    """Show options in the signature and docstring of a function or class that accepts them as ``**options``.

    Args:
        kinds: the records of the options.
        like: by record, a function whose docstring describes its options; others are described in full.
        ranks: whether several ranks call it together.
    """

    def show(shown: _T) -> _T:
        function: Any = vars(shown)["__init__"] if isinstance(shown, type) else shown
        signature = inspect.signature(function)
        hints = dict(function.__annotations__)
        parameters = []
        for name, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                del hints[name]
            else:
                parameters.append(parameter)
        returns = hints.pop("return")
        lines = []
        for kind in kinds:
            types = get_type_hints(kind.given)
            for name, one in kind.options().items():
                hints[name] = types[name]
                parameters.append(
                    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=types[name])
                )
                other = (like or {}).get(kind)
                words = one.words if other is None else f"as for :func:`{other}`."
                lines.append(f"{name}: {words}{' The same on all ranks.' * (ranks and one.alike)}")
        function.__annotations__ = {**hints, "return": returns}
        function.__signature__ = signature.replace(parameters=parameters)
        if shown.__doc__ is not None:
            shown.__doc__ = with_lines(shown.__doc__, lines)
        return shown

    return show


def with_lines(doc: str, lines: Iterable[str]) -> str:
    """A docstring with these lines in place of its line ``{options}``."""

    def wrapped(mark: re.Match[str]) -> str:
        # Since Python 3.13, docstrings come without their common indentation.
        indent = mark.group(1)
        more = {"initial_indent": indent, "subsequent_indent": f"{indent}    "}
        return "\n".join(one for line in lines for one in textwrap.wrap(line, _WIDTH, **more))  # type: ignore[arg-type]

    return re.sub(r"^( *)\{options\}$", wrapped, doc, flags=re.MULTILINE)
