"""Schemas for data from files: types, ranges and lengths, declared once per format and checked before use.

The data has the types of JSON and TOML: None, bool, int, float, str, list and dict. `check` reports the first value
that does not fit: its place, the value, and what is allowed. For example:
`timing.samples_us[3] is 'fast'; it must be a number from ...`. Code that reads checked data needs no further checks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from warpwave.workbench.terminal import printable

SHOWN = 60  # characters of a value in a message


class Mismatch(ValueError):
    """A value does not fit its schema. The message gives its place, the value, and what is allowed."""


class Schema(Protocol):
    """The condition on a value. Its `str` completes the sentence "it must be ..."."""

    def check(self, value: Any, where: str) -> None:
        """Raises Mismatch if the value does not fit; the message calls the value `where`."""


def check(schema: Schema, value: Any, where: str = "it") -> None:
    """Checks a value against a schema.

    Raises:
        Mismatch: the message names the first place that does not fit.
    """
    schema.check(value, where)


def fits(schema: Schema, value: Any) -> bool:
    """Returns whether a value fits a schema."""
    try:
        schema.check(value, "it")
    except Mismatch:
        return False
    return True


def quoted(value: Any) -> str:
    """Returns a value for a message: one line, shortened."""
    try:
        text = printable(repr(value))
    except (ValueError, RecursionError):  # Python does not print numbers of 4,300 digits or deeply nested lists
        return "too large to be shown"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _refuse(schema: Schema, value: Any, where: str) -> None:
    raise Mismatch(f"{where} is {quoted(value)}; it must be {schema}")


@dataclass(frozen=True)
class Flag:
    """True or false."""

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, bool):
            _refuse(self, value, where)

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True)
class Integer:
    """A whole number from `low` to `high`."""

    low: int
    high: int

    def check(self, value: Any, where: str) -> None:
        if type(value) is not int or not self.low <= value <= self.high:  # True is an int to isinstance
            _refuse(self, value, where)

    def __str__(self) -> str:
        return f"a whole number from {self.low:,} to {self.high:,}"


@dataclass(frozen=True)
class Number:
    """A finite number from `low` to `high`, whole or not."""

    low: float
    high: float

    def check(self, value: Any, where: str) -> None:
        if type(value) not in (int, float) or not self.low <= value <= self.high or not math.isfinite(value):
            _refuse(self, value, where)

    def __str__(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Text:
    """One line of text without control characters."""

    longest: int = 200
    shortest: int = 0

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, str) or not self.shortest <= len(value) <= self.longest or printable(value) != value:
            _refuse(self, value, where)

    def __str__(self) -> str:
        least = f"{self.shortest} to " if self.shortest else "at most "
        return f"one line of {least}{self.longest:,} characters, none of them a control character"


@dataclass(frozen=True)
class OneOf:
    """One of some words or numbers."""

    values: Sequence[Any]

    def check(self, value: Any, where: str) -> None:
        # Compares the types too, because 1 == True, and does not hash, because the value may be a list.
        if not any(type(value) is type(known) and value == known for known in self.values):
            _refuse(self, value, where)

    def __str__(self) -> str:
        return f"one of {', '.join(map(repr, self.values))}" if len(self.values) > 1 else repr(self.values[0])


@dataclass(frozen=True)
class OrNone:
    """A value that may be null."""

    schema: Schema

    def check(self, value: Any, where: str) -> None:
        if value is not None:
            self.schema.check(value, where)

    def __str__(self) -> str:
        return f"{self.schema}, or null"


@dataclass(frozen=True)
class ListOf:
    """A list whose values share one schema."""

    item: Schema
    shortest: int
    longest: int

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, list) or not self.shortest <= len(value) <= self.longest:
            _refuse(self, value, where)
        for index, item in enumerate(value):
            self.item.check(item, f"{where}[{index}]")

    def __str__(self) -> str:
        count = f"{self.shortest}" if self.shortest == self.longest else f"{self.shortest} to {self.longest:,}"
        return f"a list of {count}"


@dataclass(frozen=True)
class MapOf:
    """A table with free names, whose values share one schema."""

    item: Schema
    longest: int = 100

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, dict) or len(value) > self.longest:
            _refuse(self, value, where)
        for name, item in value.items():
            NAME.check(name, f"a name in {where}")
            self.item.check(item, _within(where, name))

    def __str__(self) -> str:
        return f"a table of at most {self.longest:,} entries"


@dataclass(frozen=True)
class Table:
    """A table of known entries.

    Attributes:
        required, optional: name -> schema of the entry.
        others: schema of entries with other names; None if they are not allowed.
    """

    required: Mapping[str, Schema] = field(default_factory=dict)
    optional: Mapping[str, Schema] = field(default_factory=dict)
    others: Schema | None = None

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            _refuse(self, value, where)
        for name in self.required:
            if name not in value:
                raise Mismatch(f"{_within(where, name)!r} is missing")
        for name, item in value.items():
            known = self.required.get(name) or self.optional.get(name) or self.others
            if known is None:
                raise Mismatch(f"{where} has an entry {quoted(name)}, which this version does not know")
            if known is self.others:
                NAME.check(name, f"a name in {where}")
            known.check(item, _within(where, name))

    def __str__(self) -> str:
        return "a table"


@dataclass(frozen=True)
class Anything:
    """Data of any form that is only shown, never computed with. Its texts and numbers are still bounded."""

    def check(self, value: Any, where: str) -> None:
        if isinstance(value, list):
            LIST_OF_ANYTHING.check(value, where)
        elif isinstance(value, dict):
            MAP_OF_ANYTHING.check(value, where)
        elif isinstance(value, str):
            REMARK.check(value, where)
        elif value is not None and not isinstance(value, bool):
            FIGURE.check(value, where)

    def __str__(self) -> str:
        return "plain data"


NAME = Text(200, 1)
REMARK = Text(10_000)
FIGURE = Number(-1e300, 1e300)
LIST_OF_ANYTHING = ListOf(Anything(), 0, 10_000)
MAP_OF_ANYTHING = MapOf(Anything(), 1_000)


def _within(where: str, name: str) -> str:
    return name if where == "it" else f"{where}.{printable(name)}"
