"""Files of others are read within bounds, and end in a sentence where they are not what they must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from warpwave.workbench import input_files
from warpwave.workbench.input_files import DEEPEST, Unreadable, parse_json, parse_toml, read_json, read_text, read_toml
from warpwave.workbench.schema import (
    Anything,
    Flag,
    Integer,
    ListOf,
    MapOf,
    Mismatch,
    Number,
    OneOf,
    OrNone,
    Schema,
    Table,
    Text,
    check,
    fits,
    quoted,
)


@pytest.mark.parametrize("depth", [DEEPEST + 2, 300, 100_000])
def test_a_nest_is_refused_at_any_depth(depth: int) -> None:
    """A little too deep for whoever walks it, too deep for a parser written in Python, and for one written in C."""
    with pytest.raises(Unreadable, match=f"nested more than {DEEPEST} deep"):
        parse_json("[" * depth + "]" * depth)
    with pytest.raises(Unreadable, match=f"nested more than {DEEPEST} deep"):
        parse_json('{"a":' * depth + "1" + "}" * depth)
    if depth < 10_000:
        with pytest.raises(Unreadable, match=f"nested more than {DEEPEST} deep"):
            parse_toml("a = " + "[" * depth + "]" * depth)
    assert parse_json("[" * DEEPEST + "]" * DEEPEST)


def test_what_cannot_be_read_is_a_sentence_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    for content, words in ((b"\xff", "is no UTF-8 text: byte 0 is 0xff"), (b"{", "is not JSON: ")):
        path.write_bytes(content)
        with pytest.raises(Unreadable, match=rf"file {words}"):
            read_json(path)
    path.write_text("a = = 1")
    with pytest.raises(Unreadable, match=r"file is not TOML: .*line 1"):
        read_toml(path)
    for other, words in (
        (tmp_path, "Is a directory"),
        (tmp_path / "none", "No such file"),
        (tmp_path / ("x" * 300), ""),
    ):
        with pytest.raises(Unreadable, match=f"cannot be read: {words}"):
            read_text(other)
    monkeypatch.setattr(input_files, "LARGEST_BYTES", 1 << 20)
    if Path("/dev/zero").exists():
        with pytest.raises(Unreadable, match="/dev/zero is larger than 1 MiB"):
            read_text(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (Flag(), [True, False], [None, 0, 1, "true"]),
        (Integer(0, 9), [0, 9], [-1, 10, True, 1.0, "1", None, 10**5000]),
        (Number(0, 9), [0, 0.5, 9], [-1e-9, 10, float("nan"), float("inf"), True, "1", 10**5000]),
        (Text(3), ["", "abc", "µs"], ["abcd", "a\n", "\x1b", "\ud800", 1, None, ["a"]]),
        (Text(3, 1), ["a"], [""]),
        (OneOf(("a", 1)), ["a", 1], [True, 1.0, "b", [], {}, None]),
        (OrNone(Flag()), [None, True], [0]),
        (ListOf(Flag(), 1, 2), [[True]], [[], [True] * 3, [1], (True,), "ab", {"a": True}]),
        (MapOf(Flag(), 2), [{}, {"a": True}], [{"a": 1}, {"": True}, {"\x1b": True}, dict.fromkeys("abc", True), []]),
        (Table({"a": Flag()}, {"b": Flag()}), [{"a": True}], [{}, {"a": 1}, {"a": True, "c": 1}, []]),
        (Table(others=Anything()), [{}, {"x": [1, {"y": None}]}], [{"x": "\x1b"}, {"\n": 1}, {"x": [float("nan")]}]),
        (Anything(), [None, "a", 1, 0.5, [[1]], {"a": {}}], ["\x1b", [["\n"]], {"a": {"b": 10**400}}]),
    ],
)  # fmt: skip
def test_a_schema_takes_what_it_declares_and_nothing_else(schema: Schema, right: list[Any], wrong: list[Any]) -> None:
    for value in right:
        check(schema, value)
    for value in wrong:
        assert not fits(schema, value)
        with pytest.raises(Mismatch) as refused:
            check(schema, value)
        assert str(refused.value).isprintable() and len(str(refused.value)) < 300


def test_the_first_place_that_does_not_fit_is_named() -> None:
    schema = Table({"a": Table({"b": ListOf(Integer(0, 9), 0, 5)})})
    for data, message in (
        ({"a": {"b": [1, 2, "x"]}}, "a.b[2] is 'x'; it must be a whole number from 0 to 9"),
        ({"a": {}}, "'a.b' is missing"),
        ({"a": {"b": []}, "z": 1}, "it has an entry 'z', which this version does not know"),
        ([], "it is []; it must be a table"),
    ):
        with pytest.raises(Mismatch) as refused:
            check(schema, data)
        assert str(refused.value) == message


def test_any_value_can_be_quoted() -> None:
    nest: list[Any] = []
    for _ in range(100_000):
        nest = [nest]
    assert quoted(nest) == quoted(10**5000) == "too large to be shown"
    assert quoted("\x1b[31m") == repr("\x1b[31m") and len(quoted("x" * 10**6)) < 100
